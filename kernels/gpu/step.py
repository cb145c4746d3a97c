"""Triton form of step.py: a lane a token or a table entry; a row's best logit by parts, joined.

Where a logit is NaN its row's token is any id that exists: the row is poisoned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.step import POISONED, Places, StepTokens

TILE = 1024
MOST_SPLITS = 128
"""Also what kernels are compiled for: one binary serves every number of rows."""


def look_up(tokens: StepTokens, newest: Tensor, blocks: Tensor, block_size: int) -> Places:
    """See step.py. All tensors are contiguous."""
    T, S, M = tokens.ids.numel(), tokens.ends.numel(), blocks.shape[1]

    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=blocks.device)

    ids, kv_slots = torch.empty_like(tokens.ids), torch.empty_like(tokens.ids)
    places = Places(ids, kv_slots, made(S + 1), made(S), made(S, M))
    launch(
        _look_up_tokens, (triton.cdiv(T, TILE),), tokens.ids, tokens.from_pool, tokens.positions,
        tokens.slots, newest, blocks, places.ids, places.kv_slots, T, M, blocks.shape[0] - 1,
        BLOCK_SIZE=block_size, TILE=TILE, num_warps=4,
    )  # fmt: skip
    launch(
        _look_up_sequences, (S + 1, triton.cdiv(M, TILE)), tokens.sequence_slots, tokens.ends,
        tokens.starts, blocks, places.query_starts, places.kv_lens, places.block_tables, S, M,
        TILE=TILE, num_warps=4,
    )  # fmt: skip
    return places


def settle(
    logits: Tensor,
    hidden: Tensor,
    drawn: Tensor | None,
    is_greedy: Tensor,
    slots: Tensor,
    ends: Tensor,
    newest: Tensor,
    verdicts: Tensor,
) -> None:
    """See step.py."""
    (R, V), H = logits.shape, hidden.shape[1]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    wanted = max(1, 2 * gpu_of(logits.device).num_sms // max(R, 1))
    piece = triton.cdiv(triton.cdiv(V, min(wanted, MOST_SPLITS)), TILE) * TILE
    splits = triton.cdiv(V, piece)
    best = torch.empty((R, splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((R, splits), dtype=torch.int32, device=logits.device)
    launch(
        _best, (R, splits), logits, best, ids, V, logits.stride(0), piece, TILE=TILE, num_warps=4
    )
    launch(
        _settle, (R,), best, ids, hidden, drawn, is_greedy, slots, ends, newest, verdicts, splits,
        H, hidden.stride(0), V, POISON=POISONED, SPLITS=MOST_SPLITS, TILE=TILE, num_warps=4,
    )  # fmt: skip


def examples(device: torch.device) -> Iterator[Example]:
    """A decode step of one sequence and of 128, around an 8B model."""
    V, M = 151936, 64
    for S in (1, 128):
        many = torch.zeros(S, dtype=torch.int64, device=device)
        starts = torch.arange(S + 1, device=device)
        tokens = StepTokens(many, many, many, many, many, many, starts)
        newest = torch.zeros(S + 1, dtype=torch.int64, device=device)
        blocks = torch.zeros((S + 1, M), dtype=torch.int32, device=device)

        def find(
            tokens: StepTokens = tokens, newest: Tensor = newest, blocks: Tensor = blocks
        ) -> None:
            look_up(tokens, newest, blocks, 16)

        yield Example(f"look_up {S}", find, moved_bytes=72 * S + 8 * S * M)
        logits = torch.zeros((S, V), dtype=torch.float32, device=device)
        hidden = torch.zeros((S, 4096), dtype=torch.bfloat16, device=device)
        for drawn in (None, many):

            def end(
                logits: Tensor = logits, hidden: Tensor = hidden, drawn: Tensor | None = drawn,
                many: Tensor = many, newest: Tensor = newest,
            ) -> None:  # fmt: skip
                settle(logits, hidden, drawn, many, many, many, newest, torch.empty_like(many))

            name = f"settle {'greedy' if drawn is None else 'drawn'} {S}x{V}"
            yield Example(name, end, moved_bytes=logits.nbytes + hidden.nbytes)


@triton.jit(
    do_not_specialize=["count", "spare"],
    do_not_specialize_on_alignment=["ids", "from_pool", "positions", "slots"],
)
def _look_up_tokens(
    ids, from_pool, positions, slots, newest, blocks, out, kv_slots, count, width, spare,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    slot = tl.load(slots + at, mask=inside, other=0)
    pooled = tl.load(from_pool + at, mask=inside, other=0) != 0
    token = tl.load(ids + at, mask=inside, other=0)
    token = tl.where(pooled, tl.load(newest + slot, mask=inside & pooled, other=0), token)
    tl.store(out + at, token, mask=inside)
    position = tl.load(positions + at, mask=inside, other=0)
    block = tl.load(blocks + slot * width + position // BLOCK_SIZE, mask=inside, other=0)
    place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(kv_slots + at, tl.where(slot == spare, -1, place), mask=inside)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots", "ends", "starts"])
def _look_up_sequences(
    slots, ends, starts, blocks, query_starts, kv_lens, tables, count, width, TILE: tl.constexpr
):
    row, piece = tl.program_id(0), tl.program_id(1)
    tl.store(query_starts + row, tl.load(starts + row).to(tl.int32), mask=piece == 0)
    if row < count:
        tl.store(kv_lens + row, tl.load(ends + row).to(tl.int32), mask=piece == 0)
        slot = tl.load(slots + row)
        at = piece * TILE + tl.arange(0, TILE)
        inside = at < width
        block = tl.load(blocks + slot * width + at, mask=inside, other=0)
        tl.store(tables + row.to(tl.int64) * width + at, block, mask=inside)


@triton.jit(do_not_specialize=["piece"])
def _best(logits, best, ids, V, stride, piece, TILE: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = tl.full((TILE,), -float("inf"), tl.float32)
    token = tl.zeros((TILE,), tl.int32) + V
    broken = tl.zeros((TILE,), tl.int32)
    begin = split * piece
    for start in range(begin, tl.minimum(begin + piece, V), TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + at, mask=at < V, other=-float("inf"))
        better = (x > value) | ((token == V) & (at < V))
        value = tl.where(better, x, value)
        token = tl.where(better, at, token)
        broken |= (x != x).to(tl.int32)
    top = tl.max(value)
    token = tl.min(tl.where(value == top, token, V))
    place = row * tl.num_programs(1) + split
    tl.store(best + place, tl.where(tl.max(broken) > 0, float("nan"), top))
    tl.store(ids + place, token)


@triton.jit(
    do_not_specialize=["splits"], do_not_specialize_on_alignment=["is_greedy", "slots", "ends"]
)
def _settle(
    best, ids, hidden, drawn, is_greedy, slots, ends, newest, verdicts, splits, width, stride, V,
    POISON: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    value = tl.load(best + row * splits + part, mask=part < splits, other=-float("inf"))
    token = tl.load(ids + row * splits + part, mask=part < splits, other=V)
    broken = tl.max((value != value).to(tl.int32))
    top = tl.max(tl.where(value != value, -float("inf"), value))
    broken |= (tl.abs(top) == float("inf")).to(tl.int32)
    chosen = tl.minimum(tl.min(tl.where(value == top, token, V)), V - 1).to(tl.int64)
    for start in range(0, width, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(hidden + row * stride + at, mask=at < width, other=0.0).to(tl.float32)
        odd = (x != x) | (tl.abs(x) == float("inf"))
        broken |= tl.max(odd.to(tl.int32))
    if drawn is not None:  # noqa: SIM102  # decided when it is compiled, the next one when it runs
        if tl.load(is_greedy + row) == 0:
            chosen = tl.load(drawn + row)
    tl.store(newest + tl.load(slots + row), chosen, mask=tl.load(ends + row) != 0)
    tl.store(verdicts + row, tl.where(broken != 0, POISON, chosen))
