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

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenfleet.kernels.rng import gumbel

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
    best = logits.max(dim=-1)
    return best.values, best.indices


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
    """One token id per row, int64 [R]. Logits [R, V] fp32 are left unchanged."""
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
    """Penalised logits [R, V], a new tensor.

    Repetition (prompt and output; Keskar et al. 2019): positive logits are divided, negative
    multiplied. Then frequency times the count and presence once, both of the output only.
    """
    place = torch.arange(rows.tokens.shape[1], device=logits.device)[None, :]
    known = place < rows.num_tokens[:, None]
    # positions beyond the history repeat its first token: scattering equal values twice is harmless
    tokens = torch.where(known, rows.tokens, rows.tokens[:, :1])
    seen = logits.gather(1, tokens)
    factor = rows.repetition[:, None]
    out = logits.scatter(1, tokens, torch.where(seen > 0, seen / factor, seen * factor))
    is_output = known & (place >= rows.num_prompt[:, None])
    counts = torch.zeros_like(out).scatter_add_(1, tokens, is_output.to(out.dtype))
    out -= rows.frequency[:, None] * counts
    out -= rows.presence[:, None] * (counts > 0)
    return out
