"""Triton form of sampling.py, without sorting.

`find_cuts` tells each row's lowest kept logit; `_draw` takes the Gumbel maximum over what is kept,
a row's vocabulary split among several programs, and `_join` picks the best of them. Nothing goes to
the host. Filters compare logits before the temperature: it changes no order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.cuts import find_cuts, key_of
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.gpu.rng import bits_of, gumbel_of
from tokenfleet.kernels.sampling import PenaltyRows, SamplingRows

DRAW_TILE = 1024
MOST_SPLITS = 64
"""Also what the joining kernel is compiled for: one binary serves every number of rows."""
HISTORY_TILE = 256


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See sampling.py."""
    R, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    keys = rows.keys.contiguous()
    cuts = find_cuts(logits, rows) if rows.filtered and V > 1 else None
    # programs enough for the GPU, each with a piece of whole tiles
    wanted = max(1, 2 * gpu_of(logits.device).num_sms // max(R, 1))
    piece = triton.cdiv(triton.cdiv(V, min(wanted, MOST_SPLITS)), DRAW_TILE) * DRAW_TILE
    splits = triton.cdiv(V, piece)
    best = torch.empty((R, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((R, splits), dtype=torch.int32, device=logits.device)
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    launch(
        _draw, (R, splits), logits, rows.temperature.contiguous(), keys, cuts, best, ids, V,
        logits.stride(0), piece, TILE=DRAW_TILE, num_warps=4,
    )  # fmt: skip
    launch(_join, (R,), best, ids, out, splits, TILE=MOST_SPLITS, num_warps=1)
    return out


def penalise(logits: Tensor, rows: PenaltyRows) -> Tensor:
    """See sampling.py; in place. `seen` counts a token, and is -1 once its logit is penalised."""
    R, V = logits.shape
    seen = torch.zeros((R, V), dtype=torch.int32, device=logits.device)
    tokens = rows.tokens.contiguous()
    shape = (tokens.shape[1], V, logits.stride(0))
    grid = (R, triton.cdiv(tokens.shape[1], HISTORY_TILE))
    launch(_count, grid, seen, tokens, rows.num_prompt, rows.num_tokens, *shape, TILE=HISTORY_TILE)
    launch(
        _penalise, grid, logits, seen, tokens, rows.num_tokens, rows.presence.contiguous(),
        rows.frequency.contiguous(), rows.repetition.contiguous(), *shape, TILE=HISTORY_TILE,
    )  # fmt: skip
    return logits


def examples(device: torch.device) -> Iterator[Example]:
    """A vocabulary of 151,936 for one sequence and for 128, drawn plainly and filtered."""
    V = 151936
    for R in (1, 128):
        logits = torch.zeros((R, V), dtype=torch.float32, device=device)
        one, many = torch.ones(R, device=device), torch.ones(R, dtype=torch.int64, device=device)
        keys = torch.zeros((R, 2), dtype=torch.int32, device=device)
        for filtered in (False, True):
            rows = SamplingRows(one, many, one, one, keys, filtered)

            def run(logits: Tensor = logits, rows: SamplingRows = rows) -> None:
                sample(logits, rows)

            name = f"sample {'filtered' if filtered else 'plain'} {R}x{V}"
            yield Example(name, run, moved_bytes=logits.nbytes)
        history = torch.zeros((R, 4096), dtype=torch.int64, device=device)
        penalties = PenaltyRows(history, many, many, one, one, one)

        def punish(logits: Tensor = logits, penalties: PenaltyRows = penalties) -> None:
            penalise(logits, penalties)

        yield Example(f"penalise {R}x4096", punish, moved_bytes=8 * R * 4096 + logits.nbytes)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "keys"])
def _draw(
    logits, temperatures, keys, cuts, best, ids, V, stride, piece, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    logits += row * stride
    temperature = tl.load(temperatures + row)
    first_key = tl.load(keys + row * 2)
    second_key = tl.load(keys + row * 2 + 1)
    value = tl.full((TILE,), -float("inf"), tl.float32)
    token = tl.full((TILE,), 0, tl.int32)
    begin = split * piece
    for start in range(begin, tl.minimum(begin + piece, V), TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits + at, mask=at < V, other=-float("inf"))
        noisy = tl.div_rn(x, temperature) + gumbel_of(bits_of(first_key, second_key, at))
        if cuts is not None:
            cut = tl.load(cuts + row * 2)
            key = key_of(x)
            kept = (key > cut) | ((key == cut) & (at <= tl.load(cuts + row * 2 + 1)))
            noisy = tl.where(kept, noisy, -float("inf"))
        better = noisy > value
        value = tl.where(better, noisy, value)
        token = tl.where(better, at, token)
    top = tl.max(value)
    # of equal ones the lowest id; where nothing is possible, any id that exists
    tl.store(best + row * tl.num_programs(1) + split, top)
    tl.store(ids + row * tl.num_programs(1) + split, tl.min(tl.where(value == top, token, V - 1)))


@triton.jit(do_not_specialize=["splits"])
def _join(best, ids, out, splits, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    value = tl.load(best + row * splits + at, mask=at < splits, other=-float("inf"))
    token = tl.load(ids + row * splits + at, mask=at < splits, other=0x7FFFFFFF)
    chosen = tl.min(tl.where(value == tl.max(value), token, 0x7FFFFFFF))
    tl.store(out + row, chosen.to(tl.int64))


@triton.jit(do_not_specialize=["length"])
def _count(seen, tokens, num_prompt, num_tokens, length, V, stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (at >= tl.load(num_prompt + row)) & (at < tl.load(num_tokens + row)) & (at < length)
    token = tl.load(tokens + row * length + at, mask=inside, other=-1)
    tl.atomic_add(seen + row * V + token, 1, mask=inside & (token >= 0))


@triton.jit(do_not_specialize=["length"])
def _penalise(
    logits, seen, tokens, num_tokens, presences, frequencies, repetitions, length, V, stride,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (at < tl.load(num_tokens + row)) & (at < length)
    token = tl.load(tokens + row * length + at, mask=inside, other=-1)
    inside &= token >= 0
    # whoever takes a token's count first penalises it; the others find -1
    count = tl.atomic_xchg(seen + row * V + token, tl.full((TILE,), -1, tl.int32), mask=inside)
    inside &= count >= 0
    factor = tl.load(repetitions + row)
    place = logits + row * stride + token
    x = tl.load(place, mask=inside, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    output = tl.where(count > 0, tl.load(presences + row), 0.0)
    x -= tl.load(frequencies + row) * count.to(tl.float32) + output
    tl.store(place, x, mask=inside)
