"""Triton form of sampling.py, without sorting.

Two launches filter: `_cuts` finds each row's lowest kept logit by narrowing a range of keys (floats
as integers of the same order) to a quarter per reading of the row; `_draw` takes the Gumbel maximum
over what is kept, a row's vocabulary split among several programs, and `_join` picks the best of
them. Nothing goes to the host. Filters compare logits before the temperature: it changes no order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.gpu.rng import bits_of, gumbel_of
from tokenfleet.kernels.sampling import PenaltyRows, SamplingRows

CUT_TILE = 2048
DRAW_TILE = 1024
HISTORY_TILE = 256


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See sampling.py."""
    R, V = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    keys = rows.keys.contiguous()
    cuts = _find_cuts(logits, rows) if rows.filtered and V > 1 else None
    # programs enough for the GPU, each with a piece of whole tiles
    wanted = max(1, 2 * gpu_of(logits.device).num_sms // max(R, 1))
    piece = triton.cdiv(triton.cdiv(V, min(wanted, 64)), DRAW_TILE) * DRAW_TILE
    splits = triton.cdiv(V, piece)
    best = torch.empty((R, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((R, splits), dtype=torch.int32, device=logits.device)
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    launch(
        _draw, (R, splits), logits, rows.temperature.contiguous(), keys, cuts, best, ids, V,
        logits.stride(0), piece, TILE=DRAW_TILE, num_warps=4,
    )  # fmt: skip
    launch(_join, (R,), best, ids, out, splits, TILE=triton.next_power_of_2(splits), num_warps=1)
    return out


def _find_cuts(logits: Tensor, rows: SamplingRows) -> Tensor:
    """int32 [R, 2]: key of the lowest kept logit, and the highest id that is kept with that key."""
    R, V = logits.shape
    cuts = torch.empty((R, 2), dtype=torch.int32, device=logits.device)
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    held = [column.contiguous() for column in columns]
    launch(_cuts, (R,), logits, *held, cuts, V, logits.stride(0), TILE=CUT_TILE, num_warps=8)
    return cuts


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


@triton.jit
def _key_of(x):
    """int32 in the order of the floats; both zeros have one key."""
    raw = (x + 0.0).to(tl.int32, bitcast=True)
    return raw ^ ((raw >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    """The float that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(
    logits, V, first, second, third, floor, factor, shift, MASS: tl.constexpr, TILE: tl.constexpr
):
    """How many keys of the row are at or above each of three, or their mass, among those at or
    above `floor`. The mass of x is 2^(x factor - shift)."""
    a = tl.zeros((TILE,), tl.float32)
    b = tl.zeros((TILE,), tl.float32)
    c = tl.zeros((TILE,), tl.float32)
    for start in range(0, V, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits + at, mask=at < V, other=-float("inf"))
        key = _key_of(x)
        if MASS:
            weight = tl.exp2(x * factor - shift)
        else:
            weight = tl.full((TILE,), 1.0, tl.float32)
        weight = tl.where((key >= floor) & (at < V), weight, 0.0)
        a += tl.where(key >= first, weight, 0.0)
        b += tl.where(key >= second, weight, 0.0)
        c += tl.where(key >= third, weight, 0.0)
    return tl.sum(a), tl.sum(b), tl.sum(c)


@triton.jit
def _highest_with(
    logits, V, low, high, floor, wanted, factor, shift, MASS: tl.constexpr, TILE: tl.constexpr
):
    """The highest key in low..high whose count or mass (see _above) reaches `wanted`; `low` if none
    does. A row of which exactly `wanted` keys are counted is not looked through further."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        step = (high - low + 3) // 4
        first = tl.minimum(low + step, high)
        second = tl.minimum(low + 2 * step, high)
        third = tl.minimum(low + 3 * step, high)
        a, b, c = _above(
            logits, V, first.to(tl.int32), second.to(tl.int32), third.to(tl.int32), floor,
            factor, shift, MASS, TILE,
        )  # fmt: skip
        if c >= wanted:
            low = third
        elif b >= wanted:
            low = second
            high = third - 1
        elif a >= wanted:
            low = first
            high = second - 1
        else:
            high = first - 1
        if not MASS:  # noqa: SIM102  # decided when it is compiled, the next one when it runs
            if (a == wanted) | (b == wanted) | (c == wanted):
                high = low
    return low.to(tl.int32)


@triton.jit
def _cuts(
    logits, temperatures, top_ks, top_ps, min_ps, cuts, V, stride, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temperature = tl.load(temperatures + row)
    factor = tl.div_rn(1.4426950408889634, temperature)
    best = tl.full((TILE,), -float("inf"), tl.float32)
    for start in range(0, V, TILE):
        at = start + tl.arange(0, TILE)
        best = tl.maximum(best, tl.load(logits + at, mask=at < V, other=-float("inf")))
    top = tl.max(best)
    shift = top * factor
    highest = _key_of(top)
    cut = _key_of(tl.full((), -float("inf"), tl.float32))
    last = V

    top_k = tl.load(top_ks + row)
    if top_k < V:
        cut = _highest_with(
            logits, V, cut, highest, cut, top_k.to(tl.float32), factor, shift, False, TILE
        )
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        # all that lies lower has a mass below 1 - top_p of the largest one
        reach = tl.log(V.to(tl.float32)) - tl.log(1.0 - top_p) + 1.0
        low = tl.maximum(cut, _key_of(top - temperature * reach))
        total, _, _ = _above(logits, V, cut, cut, cut, cut, factor, shift, True, TILE)
        wanted = top_p * total
        nucleus = _highest_with(logits, V, low, highest, cut, wanted, factor, shift, True, TILE)
        above, _, _ = _above(
            logits, V, nucleus + 1, nucleus + 1, nucleus + 1, cut, factor, shift, True, TILE
        )
        weight = tl.exp2(_float_of(nucleus) * factor - shift)
        # of equal ones the lowest ids are kept, until the mass is reached
        ties = tl.maximum(tl.ceil(tl.div_rn(wanted - above, weight)), 1.0)
        count = tl.zeros((), tl.float32)
        last = V * 0
        for start in range(0, V, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(logits + at, mask=at < V, other=-float("inf"))
            tied = ((_key_of(x) == nucleus) & (at < V)).to(tl.float32)
            kept = (tied > 0) & (count + tl.cumsum(tied, 0) <= ties)
            last = tl.maximum(last, tl.max(tl.where(kept, at, 0)))
            count += tl.sum(tied)
        cut = nucleus
    min_p = tl.load(min_ps + row)
    if min_p > 0.0:
        lowest = _key_of(top + temperature * tl.log(min_p))
        if lowest > cut:
            cut = lowest
            last = V
    tl.store(cuts + row * 2, cut)
    tl.store(cuts + row * 2 + 1, last)


@triton.jit
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
            key = _key_of(x)
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
