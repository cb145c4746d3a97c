"""From logits to token ids: penalties, filters, and the draw.

The order is that of transformers: penalties and bias, temperature, top-k, top-p, min-p. The draw is
the Gumbel maximum (argmax of logit + noise samples the softmax), with noise from the counter
generator in rng.py.

`warp` is the specification of the filters. `sample` gives the same tokens without sorting the
vocabulary: it filters the best few hundred, and falls back to `warp` for the rows whose cut lies
further down.

Shapes: R rows, V vocabulary, L longest token history.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenfleet.kernels.backend import compiled, uses_triton
from tokenfleet.kernels.rng import gumbel

_PACK = struct.Struct("@7P2q").pack
"""The argument struct of sampling.cpp."""
_PACK_GREEDY = struct.Struct("@3P2q").pack
"""That of greedy.cpp."""

BLOCK = 64
CANDIDATES = 256
"""Best tokens that the fast path looks at."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of R sampled (not greedy) rows."""

    temperature: Tensor
    """fp32 [R], above 0."""
    top_k: Tensor
    """int64 [R]; V where it is off."""
    top_p: Tensor
    """fp32 [R], 1 where it is off."""
    min_p: Tensor
    """fp32 [R], 0 where it is off."""
    keys: Tensor
    """int32 [R, 2], from rng.row_keys."""
    filtered: bool
    """Whether any of these rows uses top-k, top-p or min-p."""

    def rows(self, index: Tensor) -> SamplingRows:
        """The parameters of some rows, by a bool mask or indices."""
        return SamplingRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.keys[index],
            self.filtered,
        )


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(best logit, its id) of each row; ties go to the lowest id, NaN to the first NaN."""
    library = compiled(logits)
    if library is not None and logits.dtype == torch.float32 and logits.is_contiguous():
        values, ids = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
        library.tf_greedy(
            _PACK_GREEDY(logits.data_ptr(), values.data_ptr(), ids.data_ptr(), *logits.shape)
        )
        return values, ids
    best = logits.max(dim=-1)
    return best.values, best.indices


def best_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row [R, V] and their ids, like topk.

    They lie in the `count` blocks with the largest heads, so only those are looked through.
    """
    R, V = values.shape
    if V % BLOCK or count * BLOCK * 4 > V:
        return values.topk(count, dim=-1)
    blocks = values.view(R, V // BLOCK, BLOCK)
    which = blocks.amax(dim=-1).topk(count, dim=-1).indices
    looked_at = blocks.gather(1, which[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    best, places = looked_at.topk(count, dim=-1)
    return best, which.gather(1, places // BLOCK) * BLOCK + places % BLOCK


def warp(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits [R, V] over temperature, with -inf where a filter removes the token.

    The possible set is that of transformers' TemperatureLogitsWarper, TopKLogitsWarper,
    TopPLogitsWarper, MinPLogitsWarper, applied in this order.
    """
    scaled = logits / rows.temperature[:, None]
    if not rows.filtered:
        return scaled
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    keep = _kept(ordered, ordered.logsumexp(-1), rows)
    keep = torch.zeros_like(keep).scatter_(1, ids, keep)
    return scaled.masked_fill_(~keep, -torch.inf)


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """One token id per row, int64 [R]. Logits [R, V] fp32 are left unchanged.

    The compiled form and the reference agree but for a token whose mass lies within rounding of the
    top-p cut.
    """
    if uses_triton(logits) and logits.dtype == torch.float32:
        from tokenfleet.kernels.gpu import sampling as gpu

        return gpu.sample(logits, rows)
    library = compiled(logits)
    if library is None or logits.dtype != torch.float32 or not logits.is_contiguous():
        return sample_reference(logits, rows)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.keys)
    held = [column.contiguous() for column in columns]
    pointers = [column.data_ptr() for column in held]
    library.tf_sample(_PACK(logits.data_ptr(), *pointers, out.data_ptr(), *logits.shape))
    return out


def sample_unread(logits: Tensor, rows: SamplingRows) -> Tensor:
    """`sample` without a look at any value on the host, as a CUDA graph needs it."""
    if uses_triton(logits):
        return sample(logits, rows)
    return _draw_from_all(warp(logits, rows), rows.keys)


def sample_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The specification of `sample`: `warp`, then the Gumbel maximum."""
    if not rows.filtered or logits.shape[1] <= CANDIDATES:
        return _draw_from_all(warp(logits, rows), rows.keys)
    scaled = logits / rows.temperature[:, None]
    best, ids = _best(scaled, CANDIDATES)
    keep = _kept(best, scaled.logsumexp(-1), rows)
    # a kept value ties the last candidate's, or top-k's mass reaches beyond the candidates
    deeper = (keep & (best == best[:, -1:])).any(-1)
    deeper |= (rows.top_k > CANDIDATES) & (rows.top_k < logits.shape[1])
    best = best.masked_fill(~keep, -torch.inf)
    picked = (best + gumbel(rows.keys, ids.to(torch.int32))).argmax(dim=-1, keepdim=True)
    chosen = ids.gather(1, picked)[:, 0]
    if bool(deeper.any()):
        rest = rows.rows(deeper)
        chosen[deeper] = _draw_from_all(warp(logits[deeper], rest), rest.keys)
    return chosen


def _best(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best values of each row and their ids; of equal ones the lowest id first."""
    best, ids = scaled.topk(count, dim=-1)
    ids, order = ids.sort(dim=-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(1, order)


def _kept(ordered: Tensor, total: Tensor, rows: SamplingRows) -> Tensor:
    """Which of the best C scaled logits (descending) survive; always a head of each row.

    total: logsumexp of the whole row, for rows without top-k.
    """
    C = ordered.shape[1]
    last = rows.top_k.clamp(max=C)[:, None] - 1
    keep = ordered >= ordered.gather(1, last)
    inside = (rows.top_k <= C)[:, None]
    kept_total = ordered.masked_fill(~keep, -torch.inf).logsumexp(-1, keepdim=True)
    norm = torch.where(inside, kept_total, total[:, None])
    mass = (ordered - norm).exp()
    mass_before = mass.cumsum(-1) - mass
    keep &= (mass_before < rows.top_p[:, None]) | (rows.top_p >= 1.0)[:, None]
    keep &= ordered >= ordered[:, :1] + rows.min_p.log()[:, None]
    keep[:, 0] = True
    return keep


def _draw_from_all(scaled: Tensor, keys: Tensor) -> Tensor:
    tokens = torch.arange(scaled.shape[1], dtype=torch.int32, device=scaled.device)
    return (scaled + gumbel(keys, tokens[None, :])).argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Histories and penalties of R rows."""

    tokens: Tensor
    """int64 [R, L]: prompt, then output, then anything."""
    num_prompt: Tensor
    """int64 [R]."""
    num_tokens: Tensor
    """int64 [R], at least 1."""
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    """fp32 [R] each."""


def penalise(logits: Tensor, rows: PenaltyRows) -> Tensor:
    """Penalise logits [R, V] in place, and return them.

    Repetition (prompt and output; Keskar et al. 2019): positive logits are divided, negative
    multiplied. Then frequency times the count and presence once, both of the output only.
    """
    if uses_triton(logits) and logits.dtype == torch.float32 and logits.stride(1) == 1:
        from tokenfleet.kernels.gpu import sampling as gpu

        return gpu.penalise(logits, rows)
    return penalise_reference(logits, rows)


def penalise_reference(logits: Tensor, rows: PenaltyRows) -> Tensor:
    """The specification of `penalise`."""
    place = torch.arange(rows.tokens.shape[1], device=logits.device)[None, :]
    known = place < rows.num_tokens[:, None]
    # positions beyond the history repeat its first token: writing equal values twice is harmless
    tokens = torch.where(known, rows.tokens, rows.tokens[:, :1])
    seen = logits.gather(1, tokens)
    factor = rows.repetition[:, None]
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    counts = _counts(tokens, known & (place >= rows.num_prompt[:, None]))
    seen -= rows.frequency[:, None] * counts + rows.presence[:, None] * (counts > 0)
    return logits.scatter_(1, tokens, seen)


def _counts(tokens: Tensor, counted: Tensor) -> Tensor:
    """How often each place's token stands in its row's counted places, int64 [R, L]."""
    ordered = torch.where(counted, tokens, -1).sort(dim=1).values
    ends = torch.searchsorted(ordered, tokens, right=True)
    return ends - torch.searchsorted(ordered, tokens)
