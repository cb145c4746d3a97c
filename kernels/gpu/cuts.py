"""Finds the lowest logit that top-k, top-p and min-p keep, without sorting.

Keys are floats as integers of the same order. A pass counts, or weighs, what of a row lies at or
above fifteen keys of a range, and the next one goes on in the sixteenth part in which the wanted
number is reached: eight passes end at one key. A row is divided among programs that never wait for
each other: each pass is a launch, and every program of the next one adds up what those of the last
one found, in one order. So a row alone uses the whole GPU, and equal divisions give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.sampling import SamplingRows

TILE = 512
MOST_SPLITS = 64
"""Also what kernels are compiled for: one binary serves every number of rows."""
PASSES = 8
"""Of each search: sixteen to the eighth is the number of keys."""
WAYS = 16


def find_cuts(logits: Tensor, rows: SamplingRows) -> Tensor:
    """int32 [R, 2]: key of the lowest kept logit, and the highest id that is kept with that key."""
    R, V = logits.shape
    device = logits.device
    wanted = max(1, 2 * gpu_of(device).num_sms // max(R, 1))
    piece = triton.cdiv(triton.cdiv(V, min(wanted, MOST_SPLITS)), TILE) * TILE
    splits = triton.cdiv(V, piece)
    columns = (rows.temperature, rows.top_k, rows.top_p)
    held = [column.contiguous() for column in columns]
    tops = torch.empty((R, splits), dtype=torch.float32, device=device)
    bounds = torch.empty((2 * PASSES + 1, R, 2), dtype=torch.int64, device=device)
    sums = torch.empty((2 * PASSES + 1, R, splits, WAYS), dtype=torch.float32, device=device)
    floors = torch.empty(R, dtype=torch.int32, device=device)
    cuts = torch.empty((R, 2), dtype=torch.int32, device=device)
    shape = (V, logits.stride(0), piece, splits)
    launch(_tops, (R, splits), logits, tops, *shape[:3], TILE=TILE, num_warps=4)
    for step in range(2 * PASSES + 1):
        kind = ("count", "mass", "ties")[step // PASSES]
        launch(
            _narrow, (R, splits), logits, *held, tops, bounds[max(step - 1, 0)], bounds[step],
            sums[max(step - 1, 0)], sums[step], floors, *shape, KIND=kind,
            FIRST=step % PASSES == 0, WAYS=WAYS, SPLITS=MOST_SPLITS, TILE=TILE, num_warps=4,
        )  # fmt: skip
    launch(
        _finish, (R,), logits, *held, rows.min_p.contiguous(), tops, bounds[-1], sums[-2], sums[-1],
        floors, cuts, *shape, WAYS=WAYS, SPLITS=MOST_SPLITS, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return cuts


@triton.jit
def key_of(x):
    """int32 in the order of the floats; both zeros have one key."""
    raw = (x + 0.0).to(tl.int32, bitcast=True)
    return raw ^ ((raw >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(key):
    """The float that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["piece"])
def _tops(logits, tops, V, stride, piece, TILE: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((TILE,), -float("inf"), tl.float32)
    begin = split * piece
    for start in range(begin, tl.minimum(begin + piece, V), TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + at, mask=at < V, other=-float("inf"))
        best = tl.maximum(best, x)
    tl.store(tops + row * tl.num_programs(1) + split, tl.max(best))


@triton.jit
def _top_of(tops, row, splits, SPLITS: tl.constexpr):
    at = tl.arange(0, SPLITS)
    return tl.max(tl.load(tops + row * splits + at, mask=at < splits, other=-float("inf")))


@triton.jit
def _added_up(sums, row, splits, WAYS: tl.constexpr, SPLITS: tl.constexpr):
    """What the programs of a row found, [WAYS]."""
    split, way = tl.arange(0, SPLITS), tl.arange(0, WAYS)
    at = (row * splits + split)[:, None] * WAYS + way[None, :]
    return tl.sum(tl.load(sums + at, mask=(split < splits)[:, None], other=0.0), 0)


@triton.jit
def _keys_between(low, high, WAYS: tl.constexpr):
    """int64 [WAYS]: low, and the keys that divide the range."""
    return tl.minimum(low + (high - low + WAYS - 1) // WAYS * tl.arange(0, WAYS), high)


@triton.jit
def _narrowed(low, high, found, wanted, EXACT: tl.constexpr, WAYS: tl.constexpr):
    """The part of low..high that holds the highest key at or above which `wanted` is reached.

    EXACT: a key at or above which lies just that number ends the search.
    """
    way = tl.arange(0, WAYS)
    keys = _keys_between(low, high, WAYS)
    reached = tl.sum(((found >= wanted) & (way > 0)).to(tl.int32))
    new_low = tl.sum(tl.where(way == reached, keys, 0))
    new_high = tl.sum(tl.where(way == reached + 1, keys, 0)) - 1
    new_high = tl.where(reached < WAYS - 1, new_high, high)
    if EXACT:
        hits = (found == wanted) & (way > 0)
        hit = tl.max(tl.where(hits, keys, low))
        exact = tl.max(hits.to(tl.int32)) > 0
        new_low = tl.where(exact, hit, new_low)
        new_high = tl.where(exact, hit, new_high)
    open_ = low < high
    return tl.where(open_, new_low, low), tl.where(open_, new_high, high)


@triton.jit(
    do_not_specialize=["piece", "splits"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps"],
)
def _narrow(
    logits, temperatures, top_ks, top_ps, tops, bounds_before, bounds, sums_before, sums, floors,
    V, stride, piece, splits,
    KIND: tl.constexpr, FIRST: tl.constexpr, WAYS: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One pass. KIND: whether numbers or masses are added up; in the last one, "ties", the mass
    above the cut and the number of those that are equal to it. FIRST: of its kind."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    temperature = tl.load(temperatures + row)
    factor = tl.div_rn(1.4426950408889634, temperature)
    top = _top_of(tops, row, splits, SPLITS)
    shift = top * factor
    lowest = key_of(tl.full((), -float("inf"), tl.float32)).to(tl.int64)
    low, high = lowest, key_of(top).to(tl.int64)
    active = top_p < 1.0
    if KIND == "count":
        active = top_k < V
    if not active:
        high = low
    if not (KIND == "count" and FIRST):
        before = tl.load(bounds_before + row * 2)
        until = tl.load(bounds_before + row * 2 + 1)
        found = _added_up(sums_before, row, splits, WAYS, SPLITS)
        counted: tl.constexpr = (KIND == "count") or (KIND == "mass" and FIRST)
        wanted = top_k.to(tl.float32)
        if not counted:
            wanted = top_p * tl.sum(tl.where(tl.arange(0, WAYS) == 0, found, 0.0))
        low, high = _narrowed(before, until, found, wanted, counted, WAYS)
    floor = lowest.to(tl.int32)
    if KIND == "mass" and FIRST:  # the search by number has ended: what it kept is weighed
        floor = low.to(tl.int32)
        # all that lies lower has a mass below 1 - top_p of the largest one
        reach = tl.log(V.to(tl.float32)) - tl.log(1.0 - top_p) + 1.0
        low = tl.maximum(low, key_of(top - temperature * reach).to(tl.int64))
        high = tl.where(active, key_of(top).to(tl.int64), low)
        if split == 0:
            tl.store(floors + row, floor)
    elif KIND != "count":
        floor = tl.load(floors + row)
    if split == 0:
        tl.store(bounds + row * 2, low)
        tl.store(bounds + row * 2 + 1, high)
    way = tl.arange(0, WAYS)
    keys = _keys_between(low, high, WAYS).to(tl.int32)
    if KIND == "ties":
        keys = tl.where(way == 0, low.to(tl.int32) + 1, 0)
    elif KIND == "mass":
        keys = tl.where(way == 0, floor, keys)
    # one that is not looked for any further need not be read, but for the last sums
    begin = split * piece
    end = tl.minimum(begin + piece, V)
    if not active:
        end = begin
    total = tl.zeros((TILE, WAYS), tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + at, mask=at < V, other=-float("inf"))
        key = key_of(x)
        weight = tl.full((TILE,), 1.0, tl.float32)
        if KIND != "count":
            weight = tl.exp2(x * factor - shift)
        weight = tl.where((key >= floor) & (at < V), weight, 0.0)
        if KIND == "ties":
            tied = ((key == low.to(tl.int32)) & (at < V)).to(tl.float32)
            above = tl.where(key >= low.to(tl.int32) + 1, weight, 0.0)
            both = tl.where((way == 0)[None, :], above[:, None], tied[:, None])
            total += tl.where((way < 2)[None, :], both, 0.0)
        else:
            total += tl.where(key[:, None] >= keys[None, :], weight[:, None], 0.0)
    tl.store(sums + (row * splits + split) * WAYS + way, tl.sum(total, 0))


@triton.jit(
    do_not_specialize=["piece", "splits"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps"],
)
def _finish(
    logits, temperatures, top_ks, top_ps, min_ps, tops, bounds, sums_of_mass, sums_of_ties, floors,
    cuts, V, stride, piece, splits,
    WAYS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    factor = tl.div_rn(1.4426950408889634, temperature)
    top = _top_of(tops, row, splits, SPLITS)
    cut = tl.load(floors + row)
    last = V
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        nucleus = tl.load(bounds + row * 2).to(tl.int32)
        way, split = tl.arange(0, WAYS), tl.arange(0, SPLITS)
        mass = _added_up(sums_of_mass, row, splits, WAYS, SPLITS)
        wanted = top_p * tl.sum(tl.where(way == 0, mass, 0.0))
        counts = _added_up(sums_of_ties, row, splits, WAYS, SPLITS)
        above = tl.sum(tl.where(way == 0, counts, 0.0))
        weight = tl.exp2(_float_of(nucleus) * factor - top * factor)
        # of equal ones the lowest ids are kept, until the mass is reached
        ties = tl.maximum(tl.ceil(tl.div_rn(wanted - above, weight)), 1.0)
        inside = split < splits
        tied = tl.load(sums_of_ties + (row * splits + split) * WAYS + 1, mask=inside, other=0.0)
        before = tl.cumsum(tied, 0) - tied
        # the program whose piece holds the last of them
        chosen = tl.max(tl.where((tied > 0) & (before < ties), split, 0))
        count = tl.sum(tl.where(split == chosen, before, 0.0))
        last = V * 0
        begin = chosen * piece
        for start in range(begin, tl.minimum(begin + piece, V), TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(logits + row * stride + at, mask=at < V, other=-float("inf"))
            equal = ((key_of(x) == nucleus) & (at < V)).to(tl.float32)
            kept = (equal > 0) & (count + tl.cumsum(equal, 0) <= ties)
            last = tl.maximum(last, tl.max(tl.where(kept, at, 0)))
            count += tl.sum(equal)
        cut = nucleus
    min_p = tl.load(min_ps + row)
    if min_p > 0.0:
        lowest = key_of(top + temperature * tl.log(min_p))
        if lowest > cut:
            cut = lowest
            last = V
    tl.store(cuts + row * 2, cut)
    tl.store(cuts + row * 2 + 1, last)
