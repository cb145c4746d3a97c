"""Triton form of paged_attention.py: chunks, decodes and both in one kernel.

A program owns one KV head and a tile of query rows: TILE_M // group tokens of one sequence times
the `group` query heads of that KV head. Which sequence, it finds by binary search in query_starts:
tile t belongs to the last s with query_starts[s] // tokens + s <= t. Rows behind the last sequence
are taken as one more sequence without keys, so every row of the output is written.

Where there are too few programs for the GPU, the keys are split among several, and a second kernel
joins the parts. How many is decided from shapes and `max_kv_len` alone: no synchronisation, and a
CUDA graph captured with the longest length serves every shorter one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenfleet.kernels.gpu.attention_tiles import pick_splits, pick_tiles
from tokenfleet.kernels.gpu.fp8_bytes import kernel_view, widen
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool

LOG2E = math.log2(math.e)


def paged_attention(
    q: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See paged_attention.py. Heads and blocks are contiguous in their last dimension(s)."""
    T, Hq, D = q.shape
    Hkv, block_size = pool.k.shape[1:3]
    if q.stride(2) != 1:
        q = q.contiguous()
    gpu, group = gpu_of(q.device), Hq // Hkv
    tiles = pick_tiles(gpu, q.dtype, pool.k.dtype, D, group, batch.max_query_len, T * Hq)
    tokens = max(1, tiles.m // group)
    one_token = batch.max_query_len <= 1 and batch.num_sequences == T
    rows = T if one_token else T // tokens + batch.num_sequences + 1
    splits = pick_splits(gpu, rows * Hkv, batch.max_kv_len, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    parts, weights = (None, None) if splits == 1 else empty_parts(q, splits)
    score_scale = scale * pool.k_scale * LOG2E
    if softcap is not None:
        score_scale *= 2.0 / softcap
    launch(
        _attention,
        (rows, Hkv, splits),
        q, kernel_view(pool.k, gpu), kernel_view(pool.v, gpu), out, parts, weights,
        batch.block_tables, batch.query_starts, batch.kv_lens, sinks,
        batch.num_sequences, T, q.stride(0), q.stride(1), batch.block_tables.stride(0),
        pool.k.stride(0), pool.k.stride(1), score_scale, (softcap or 0.0) * LOG2E, window or 0,
        pool.v_scale,
        DIM=D, DIM_PAD=max(16, triton.next_power_of_2(D)), GROUP=group, BLOCK_SIZE=block_size,
        TILE_M=tiles.m, TILE_N=tiles.n, TOKENS=tokens, ONE_TOKEN=one_token,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        launch(
            join_parts, (T, Hq), parts, weights, out, Hq,
            DIM=D, DIM_PAD=max(16, triton.next_power_of_2(D)), SPLITS=splits, EARLY=False,
            num_warps=4,
        )  # fmt: skip
    return out


def empty_parts(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """What the splits of a row found, and how much each weighs (log 2)."""
    T, Hq, D = q.shape
    parts = torch.empty((T, Hq, splits, D), dtype=torch.float32, device=q.device)
    return parts, torch.empty((T, Hq, splits), dtype=torch.float32, device=q.device)


@dataclass(frozen=True, slots=True)
class _Case:
    """A step that examples are made of."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    query_lens: tuple[int, ...]
    kv_len: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    limits: bool = False
    """With a window of 1024, a soft cap and sinks."""
    common: bool = True

    def on(self, device: torch.device) -> Example:
        """The example over a pool in which every sequence has blocks of its own."""
        S, T = len(self.query_lens), sum(self.query_lens)
        blocks = -(-self.kv_len // 16)
        shape = (S * blocks + 1, self.kv_heads, 16, self.dim)
        k, v = (torch.zeros(shape, dtype=self.kv_dtype or self.dtype, device=device) for _ in "kv")
        q = torch.zeros((T, self.heads, self.dim), dtype=self.dtype, device=device)
        table = torch.arange(1, S * blocks + 1, dtype=torch.int32, device=device).view(S, blocks)
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32).to(device)
        where = torch.zeros(T, dtype=torch.int64, device=device)
        batch = AttentionBatch(
            query_starts=starts, block_tables=table, slots=where, positions=where,
            kv_lens=torch.full((S,), self.kv_len, dtype=torch.int32, device=device),
            num_decodes=self.query_lens.count(1),
            max_query_len=max(self.query_lens), max_kv_len=self.kv_len,
        )  # fmt: skip
        window, softcap = (1024, 50.0) if self.limits else (None, None)
        sinks = torch.zeros(self.heads, device=device) if self.limits else None

        def run() -> Tensor:
            return paged_attention(
                q, KVPool(k, v), batch, scale=0.1, window=window, softcap=softcap, sinks=sinks
            )

        seen = sum(self._pairs(length) for length in self.query_lens)
        rows = sum(min(self.kv_len, n + (window or self.kv_len)) for n in self.query_lens)
        return Example(
            f"paged_attention {self.name}",
            run,
            moved_bytes=2 * q.nbytes + rows * 2 * k[0, :, 0].nbytes,
            flops=4 * seen * self.heads * self.dim,
            common=self.common,
        )

    def _pairs(self, length: int) -> int:
        """(query, key) pairs of the last `length` tokens of a sequence."""
        width = 1024 if self.limits else self.kv_len
        return sum(min(width, self.kv_len - i) for i in range(length))


def examples(device: torch.device) -> Iterator[Example]:
    """Decodes, chunks and both at the head shapes of shipped models."""
    fp16, fp8 = torch.float16, torch.float8_e4m3fn
    ones, few, mixed = (1,) * 32, (1, 1, 12), (1,) * 16 + (2048,)
    cases = [
        _Case("decode 1x4096 32/8x128", 32, 8, 128, (1,), 4096),
        _Case("decode 32x4096 32/8x128 fp8 KV", 32, 8, 128, ones, 4096, kv_dtype=fp8),
        _Case("prompt 8192 32/8x128", 32, 8, 128, (8192,), 8192),
        _Case("prompt 4096 8/4x256 limits", 8, 4, 256, (4096,), 4096, limits=True),
        _Case("mixed 64+256 32/8x128", 32, 8, 128, (1,) * 64 + (256,), 2048),
        _Case("prompt 2048 28/4x128", 28, 4, 128, (2048,), 2048),
        _Case("prompt 2048 28/4x128 fp8 KV", 28, 4, 128, (2048,), 2048, kv_dtype=fp8, common=False),
    ]
    for heads, kv_heads, dim in ((14, 2, 64), (32, 32, 80), (24, 8, 96), (16, 8, 128), (8, 4, 256)):
        for what, lens in (("decode 32x4096", ones), ("few", few), ("mixed 16+2048", mixed)):
            name, shape = f"{what} {heads}/{kv_heads}x{dim}", (heads, kv_heads, dim, lens, 4096)
            cases.append(_Case(name, *shape, common=False))
            if dim in (64, 128):
                cases.append(_Case(f"{name} limits", *shape, limits=True, common=False))
            if dim in (64, 128, 256):
                cases.append(_Case(f"{name} fp8 KV", *shape, kv_dtype=fp8, common=False))
    for dtype in (fp16, torch.float32):
        name = f"prompt 2048 64/8x128 {dtype}"
        cases.append(_Case(name, 64, 8, 128, (2048,), 2048, dtype, common=False))
    yield from (case.on(device) for case in cases)


@triton.jit
def _find_sequence(query_starts, num_seqs, tile, TOKENS: tl.constexpr):
    """The sequence 0 .. num_seqs that owns a tile of query rows."""
    left = tl.full((), 0, tl.int32)
    right = tl.full((), num_seqs + 1, tl.int32)
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _scores(q, keys, score_scale, softcap, SOFTCAP: tl.constexpr):
    """Logits in units of log 2."""
    scores = tl.dot(q, keys, input_precision="tf32x3") * score_scale
    if SOFTCAP:  # c tanh(x) with tanh(x) = 1 - 2 / (1 + e^2x)
        scores = softcap - 2.0 * softcap / (1.0 + tl.exp2(scores))
    return scores


@triton.jit
def attend_keys(
    acc, top, total, q, k_head, v_head, table, first, last, position, kv_stride_block,
    score_scale, softcap, window,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys first .. last, in tiles. Not MASKED: every row sees all of them.

    The block table is read one tile ahead: were it read in the same turn, the compiler would give
    it half of the stages, and keys and values would not be on their way while a tile is computed.
    """
    d = tl.arange(0, DIM_PAD)
    inside = d < DIM
    column = first + tl.arange(0, TILE_N)
    block = tl.load(table + column // BLOCK_SIZE, mask=column < last, other=0)
    for start in range(first, last, TILE_N):
        column = start + tl.arange(0, TILE_N)
        at = block.to(tl.int64) * kv_stride_block + (column % BLOCK_SIZE) * DIM
        ahead = column + TILE_N
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < last, other=0)
        if MASKED:
            seen = column < last
            read_k, read_v = inside[:, None] & seen[None, :], seen[:, None] & inside[None, :]
            keys = tl.load(k_head + at[None, :] + d[:, None], mask=read_k, other=0.0)
            values = tl.load(v_head + at[:, None] + d[None, :], mask=read_v, other=0.0)
        else:
            if DIM == DIM_PAD:
                keys = tl.load(k_head + at[None, :] + d[:, None])
                values = tl.load(v_head + at[:, None] + d[None, :])
            else:
                keys = tl.load(k_head + at[None, :] + d[:, None], mask=inside[:, None], other=0.0)
                values = tl.load(v_head + at[:, None] + d[None, :], mask=inside[None, :], other=0.0)
        scores = _scores(q, widen(keys, q.dtype), score_scale, softcap, SOFTCAP)
        if MASKED:
            visible = column[None, :] <= position[:, None]
            if WINDOW:
                visible &= column[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # a row that has seen nothing yet has no maximum
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None]
        acc = tl.dot(weights.to(q.dtype), widen(values, q.dtype), acc, input_precision="tf32x3")
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "window"])
def _attention(
    q, k, v, out, parts, part_weights, tables, query_starts, kv_lens, sinks,
    num_seqs, num_tokens, q_stride_token, q_stride_head, table_stride,
    kv_stride_block, kv_stride_head, score_scale, softcap, window, v_scale,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TOKENS: tl.constexpr, ONE_TOKEN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    kv_head, split, num_splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    # the last tiles have the most keys to see: they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if ONE_TOKEN:
        begin, query_len, first_query = tile, 1, 0
        owned = tl.load(query_starts + tile + 1) > tl.load(query_starts + tile)
        kv_len = tl.where(owned, tl.load(kv_lens + tile), 0)
        sequence = tile
    else:
        sequence = _find_sequence(query_starts, num_seqs, tile, TOKENS)
        real = sequence < num_seqs
        begin = tl.load(query_starts + sequence)
        end = tl.load(query_starts + sequence + 1, mask=real, other=num_tokens)
        kv_len = tl.load(kv_lens + sequence, mask=real, other=0)
        query_len = end - begin
        first_query = (tile - (begin // TOKENS + sequence)) * TOKENS
        if first_query >= query_len:
            return

    row = tl.arange(0, TILE_M)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (row < TOKENS * GROUP) & (query < query_len)
    token = (begin + query).to(tl.int64)
    position = kv_len - query_len + query  # of the row's token in its sequence
    d = tl.arange(0, DIM_PAD)
    cell = valid[:, None] & (d < DIM)[None, :]
    at = token * q_stride_token + head * q_stride_head
    rows = tl.load(q + at[:, None] + d[None, :], mask=cell, other=0.0)

    acc = tl.zeros((TILE_M, DIM_PAD), tl.float32)
    top = tl.full((TILE_M,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    if SINKS:  # a logit that has been seen before any key, by the first split
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)

    # this tile sees the keys first .. last; all of its rows see those below `whole`
    first_position = kv_len - query_len + first_query
    last = tl.minimum(kv_len, first_position + TOKENS)
    first = 0
    if WINDOW:
        first = tl.maximum(first_position - window + 1, 0) // TILE_N * TILE_N
    share = tl.cdiv(tl.cdiv(last - first, TILE_N), num_splits) * TILE_N
    first += split * share
    last = tl.minimum(last, first + share)
    whole = first
    if not (WINDOW or ONE_TOKEN):
        whole = tl.maximum(first, tl.minimum(last, first_position + 1) // TILE_N * TILE_N)

    table = tables + sequence.to(tl.int64) * table_stride
    k_head, v_head = k + kv_head * kv_stride_head, v + kv_head * kv_stride_head
    if not (WINDOW or ONE_TOKEN):
        acc, top, total = attend_keys(
            acc, top, total, rows, k_head, v_head, table, first, whole, position,
            kv_stride_block, score_scale, softcap, window,
            DIM, DIM_PAD, BLOCK_SIZE, TILE_N, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    acc, top, total = attend_keys(
        acc, top, total, rows, k_head, v_head, table, whole, last, position,
        kv_stride_block, score_scale, softcap, window,
        DIM, DIM_PAD, BLOCK_SIZE, TILE_N, WINDOW, SOFTCAP, True,
    )  # fmt: skip

    below = tl.where(total == 0.0, 1.0, total)
    result = acc * (v_scale / below)[:, None]
    place = token * (tl.num_programs(1) * GROUP) + head
    if parts is None:
        to = out + (place * DIM)[:, None] + d[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=cell)
    else:
        part = place * num_splits + split
        to = parts + (part * DIM)[:, None] + d[None, :]
        tl.store(to, result, mask=cell & (total != 0.0)[:, None])
        weight = tl.where(total == 0.0, -float("inf"), top + tl.log2(below))
        tl.store(part_weights + part, weight, mask=valid)


@triton.jit
def join_parts(
    parts, part_weights, out, num_heads,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weigh each split's result by its part of the softmax's denominator."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, DIM_PAD)
    part = place * SPLITS + split
    weight = tl.load(part_weights + part)
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == -float("inf"), 0.0, top))
    cell = (weight != 0.0)[:, None] & (d < DIM)[None, :]
    results = tl.load(parts + (part * DIM)[:, None] + d[None, :], mask=cell, other=0.0)
    total = tl.sum(weight, 0)
    joined = tl.sum(results * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * DIM + d, joined.to(out.dtype.element_ty), mask=d < DIM)
