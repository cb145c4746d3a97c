"""Triton form of row_attention.py: what lies between two products of a one-token step, in one pass.

A program owns one KV head and a part of its keys. Each norms and rotates the queries of that head
for itself; the first one also makes the new key and value, stores them, and takes them as what was
seen before any other. So nobody reads from the pool what is written in the same launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenfleet.kernels.gpu.attention_tiles import pick_splits, pick_tiles
from tokenfleet.kernels.gpu.fp8_bytes import kernel_view, narrow, widen
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.paged_attention import LOG2E, attend_keys, empty_parts, join_parts
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.rope_kv import HeadNorms


def row_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    heads: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    norms: HeadNorms | None,
) -> Tensor:
    """See row_attention.py."""
    Hkv, block_size, D = pool.k.shape[1:]
    gpu, group, rot_dim = gpu_of(qkv.device), heads // Hkv, cos_sin.shape[1]
    tiles = pick_tiles(gpu, qkv.dtype, pool.k.dtype, D, group, 1, heads)
    splits = pick_splits(gpu, Hkv, batch.max_kv_len, window, tiles.n)
    out = torch.empty((1, heads, D), dtype=qkv.dtype, device=qkv.device)
    parts, weights = (None, None) if splits == 1 else empty_parts(out, splits)
    score_scale = scale * pool.k_scale * LOG2E
    if softcap is not None:
        score_scale *= 2.0 / softcap
    pad = max(16, triton.next_power_of_2(D))
    launch(
        _row_attention, (Hkv, splits), qkv.contiguous(), kernel_view(pool.k, gpu),
        kernel_view(pool.v, gpu), out, parts, weights, cos_sin, norms.q if norms else None,
        norms.k if norms else None, batch.block_tables, batch.kv_lens, batch.positions,
        batch.slots, pool.k.stride(0), pool.k.stride(1), score_scale, (softcap or 0.0) * LOG2E,
        window or 0, 1.0 / pool.k_scale, 1.0 / pool.v_scale, pool.v_scale,
        norms.eps if norms else 0.0, norms.offset if norms else 0.0,
        DIM=D, DIM_PAD=pad, HALF=rot_dim // 2, GROUP=group, BLOCK_SIZE=block_size,
        TILE_M=tiles.m, TILE_N=tiles.n, WINDOW=window is not None, SOFTCAP=softcap is not None,
        EARLY=gpu.early, early=gpu.early, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        launch(
            join_parts, (1, heads), parts, weights, out, heads, DIM=D, DIM_PAD=pad, SPLITS=splits,
            EARLY=gpu.early, early=gpu.early, num_warps=4,
        )  # fmt: skip
    return out


def examples(device: torch.device) -> Iterator[Example]:
    """One token behind 4096 others, at the head shapes of an 8B and of a 0.6B model."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for heads, dim, kv_dtype, normed in (
        (32, 128, bf16, True), (16, 128, bf16, True), (32, 128, fp8, True), (32, 64, bf16, False),
    ):  # fmt: skip
        length, kv_heads = 4096, 8
        qkv = torch.zeros((1, (heads + 2 * kv_heads) * dim), dtype=bf16, device=device)
        k, v = (
            torch.zeros((length // 16 + 1, kv_heads, 16, dim), dtype=kv_dtype, device=device)
            for _ in "kv"
        )
        table = torch.arange(1, length // 16 + 1, dtype=torch.int32, device=device)[None]
        lens = torch.full((1,), length, dtype=torch.int32, device=device)
        at = torch.full((1,), length - 1, dtype=torch.int64, device=device)
        starts = torch.tensor([0, 1], dtype=torch.int32).to(device)
        batch = AttentionBatch(starts, lens, table, at + 16, at, 1, 1, length)
        angles = torch.zeros((length, dim), device=device)
        weight = torch.ones(dim, dtype=bf16, device=device)
        norms = HeadNorms(weight, weight, 1e-6) if normed else None

        def run(
            qkv: Tensor = qkv, angles: Tensor = angles, pool: KVPool = KVPool(k, v),  # noqa: B008
            batch: AttentionBatch = batch, norms: HeadNorms | None = norms, heads: int = heads,
        ) -> None:  # fmt: skip
            row_attention(
                qkv, angles, pool, batch, heads=heads, scale=0.1, window=None, softcap=None,
                norms=norms,
            )  # fmt: skip

        moved = 2 * length * kv_heads * dim * kv_dtype.itemsize
        flops = 4 * length * heads * dim
        name = f"row_attention 1x{length} {heads}/{kv_heads}x{dim} {kv_dtype}"
        yield Example(name, run, moved, flops, common=heads == 32 and kv_dtype == bf16 and normed)


@triton.jit
def _rotated(
    row, weights, cos_sin, position, inside, eps, offset,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Heads [rows, DIM_PAD] at the pointers `row`, in float32: where there are weights normed and
    rounded to `dtype`, as the norm alone would, then rotated."""
    d = tl.arange(0, DIM_PAD)
    pair = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))  # what d turns with
    real = d < DIM
    mine = inside[:, None] & real[None, :]
    x = tl.load(row[:, None] + d[None, :], mask=mine, other=0.0).to(tl.float32)
    y = tl.load(row[:, None] + pair[None, :], mask=mine, other=0.0).to(tl.float32)
    if weights is not None:
        scale = tl.math.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        gain = tl.load(weights + d, mask=real, other=0.0).to(tl.float32) + offset
        other = tl.load(weights + pair, mask=real, other=0.0).to(tl.float32) + offset
        x = (x * scale * gain[None, :]).to(dtype).to(tl.float32)
        y = (y * scale * other[None, :]).to(dtype).to(tl.float32)
    turned = d < 2 * HALF
    angle = cos_sin + position * (2 * HALF) + d % HALF
    cos = tl.load(angle, mask=turned, other=1.0)
    sin = tl.load(angle + HALF, mask=turned, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    return x * cos[None, :] + y * sin[None, :]


@triton.jit(do_not_specialize=["window"])
def _row_attention(
    qkv, k, v, out, parts, part_weights, cos_sin, q_weights, k_weights, table, kv_lens, positions,
    slots, kv_stride_block, kv_stride_head, score_scale, softcap, window, k_inverse, v_inverse,
    v_scale, eps, offset,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    kv_head, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    kv_heads = tl.num_programs(0)
    dtype: tl.constexpr = qkv.dtype.element_ty
    kv_dtype: tl.constexpr = k.dtype.element_ty
    position = tl.load(positions)
    slot = tl.load(slots)
    old = tl.load(kv_lens) - 1  # keys that lie in the pool; -1: padding
    row = tl.arange(0, TILE_M)
    valid = row < GROUP
    head = kv_head * GROUP + row
    d = tl.arange(0, DIM_PAD)
    real = d < DIM
    rows = _rotated(
        qkv + head * DIM, q_weights, cos_sin, position, valid, eps, offset,
        DIM, DIM_PAD, HALF, dtype,
    ).to(dtype)  # fmt: skip
    k_head, v_head = k + kv_head * kv_stride_head, v + kv_head * kv_stride_head
    acc = tl.zeros((TILE_M, DIM_PAD), tl.float32)
    top = tl.full((TILE_M,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    if split == 0:
        only = tl.arange(0, 1)
        from_k = qkv + (kv_heads * GROUP + kv_head + only) * DIM
        new_k = _rotated(
            from_k, k_weights, cos_sin, position, only == 0, eps, offset, DIM, DIM_PAD, HALF, dtype
        )
        from_v = qkv + (kv_heads * (GROUP + 1) + kv_head) * DIM + d[None, :]
        new_v = tl.load(from_v, mask=real[None, :], other=0.0)
        key = narrow(new_k * k_inverse, kv_dtype)
        value = narrow(new_v.to(tl.float32) * v_inverse, kv_dtype)
        if slot >= 0:
            place = slot // BLOCK_SIZE * kv_stride_block + slot % BLOCK_SIZE * DIM + d[None, :]
            tl.store(k_head + place, key, mask=real[None, :])
            tl.store(v_head + place, value, mask=real[None, :])
        seen = widen(key, dtype).to(tl.float32)
        score = tl.sum(rows.to(tl.float32) * seen, 1) * score_scale
        if SOFTCAP:
            score = softcap - 2.0 * softcap / (1.0 + tl.exp2(score))
        exists = valid & (old >= 0)
        top = tl.where(exists, score, top)
        total = tl.where(exists, 1.0, total)
        acc = tl.where(exists[:, None], widen(value, dtype).to(tl.float32), acc)

    first = 0
    if WINDOW:
        first = tl.maximum(old - window + 1, 0) // TILE_N * TILE_N
    share = tl.cdiv(tl.cdiv(tl.maximum(old - first, 0), TILE_N), num_splits) * TILE_N
    first += split * share
    last = tl.minimum(old, first + share)
    before = tl.zeros((TILE_M,), tl.int32) + old - 1  # as if the last old key were the row's own
    acc, top, total = attend_keys(
        acc, top, total, rows, k_head, v_head, table, first, last, before,
        kv_stride_block, score_scale, softcap, window - 1,
        DIM, DIM_PAD, BLOCK_SIZE, TILE_N, WINDOW, SOFTCAP, True,
    )  # fmt: skip

    below = tl.where(total == 0.0, 1.0, total)
    result = acc * (v_scale / below)[:, None]
    cell = valid[:, None] & real[None, :]
    if parts is None:
        tl.store(out + (head * DIM)[:, None] + d[None, :], result.to(dtype), mask=cell)
    else:
        part = head * num_splits + split
        to = parts + (part * DIM)[:, None] + d[None, :]
        tl.store(to, result, mask=cell & (total != 0.0)[:, None])
        weight = tl.where(total == 0.0, -float("inf"), top + tl.log2(below))
        tl.store(part_weights + part, weight, mask=valid)
