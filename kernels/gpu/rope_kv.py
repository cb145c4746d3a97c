"""Triton form of rope_kv.py: norm of the heads, rotation and the write of keys and values at once.

A program owns a tile of tokens and one head: a query head, or a KV head with its key and its value.
The two halves of a pair lie in two register tiles of equal shape, so nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.fp8_bytes import kernel_view, narrow
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.rope_kv import HeadNorms

FEW_TOKENS = 64
"""Up to here a program takes one token, to keep the GPU busy."""
MANY, MANY_WARPS = 16, 4
"""Tokens and warps of a program otherwise."""


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See rope_kv.py."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k.to(q.dtype), v))
    T, Hq, D = q.shape
    gpu, rot_dim = gpu_of(q.device), cos_sin.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    few = T <= FEW_TOKENS
    tokens, warps = (1, 1) if few else (MANY, MANY_WARPS)
    launch(
        _rope_kv,
        (triton.cdiv(T, tokens), Hq + k.shape[1]),
        q, k, v, out, kernel_view(pool.k, gpu), kernel_view(pool.v, gpu), cos_sin,
        norms.q if norms else None, norms.k if norms else None, batch.positions, batch.slots,
        T, Hq, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        pool.k.stride(0), pool.k.stride(1), 1.0 / pool.k_scale, 1.0 / pool.v_scale,
        norms.eps if norms else 0.0, norms.offset if norms else 0.0,
        DIM=D, HALF=rot_dim // 2, HALF_PAD=triton.next_power_of_2(max(rot_dim // 2, 1)),
        REST_PAD=triton.next_power_of_2(D - rot_dim) if rot_dim < D else 0,
        DIM_PAD=triton.next_power_of_2(D), BLOCK_SIZE=pool.block_size, TOKENS=tokens,
        INTERLEAVED=interleaved, NORMS=norms is not None, num_warps=warps,
    )  # fmt: skip
    return out


def examples(device: torch.device) -> Iterator[Example]:
    """A decode step and a prompt, with and without norms, at shipped head shapes."""
    fp8 = torch.float8_e4m3fn
    for T, heads, kv_heads, dim, rot_dim, normed, kv_dtype, common in (
        (32, 32, 8, 128, 128, True, torch.bfloat16, True),
        (8192, 32, 8, 128, 128, True, torch.bfloat16, True),
        (32, 9, 3, 64, 64, False, torch.bfloat16, False),
        (8192, 32, 8, 128, 128, True, fp8, True),
        (32, 32, 8, 128, 128, False, fp8, False),
        (8192, 32, 32, 80, 20, False, torch.bfloat16, False),
        (8192, 32, 32, 96, 96, False, torch.bfloat16, False),
        (8192, 8, 4, 256, 256, True, torch.bfloat16, False),
    ):
        fused = torch.zeros(T, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16, device=device)
        q, k, v = fused.view(T, -1, dim).split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        blocks = torch.zeros((T // 16 + 1, kv_heads, 16, dim), dtype=kv_dtype, device=device)
        where = torch.arange(T, device=device)
        one = torch.zeros(2, dtype=torch.int32, device=device)
        batch = AttentionBatch(one, one, one[None], where + 16, where, 0, T, T)
        table = torch.zeros((8192, rot_dim), device=device)
        weight = torch.ones(dim, dtype=torch.bfloat16, device=device)
        norms = HeadNorms(weight, weight, 1e-6) if normed else None

        def run(
            args: tuple[Tensor, ...] = (q, k, v, table),
            pool: KVPool = KVPool(blocks, blocks.clone()),  # noqa: B008  # one pool an example
            batch: AttentionBatch = batch,
            norms: HeadNorms | None = norms,
        ) -> Tensor:
            q, k, v, table = args
            return rope_and_write_kv(q, k, v, table, pool, batch, norms=norms)

        name = f"rope_kv {T}x{heads}/{kv_heads}x{dim} rot {rot_dim} norms {normed} {kv_dtype}"
        written = 2 * T * kv_heads * dim * kv_dtype.itemsize
        moved = fused.nbytes + q.numel() * 2 + written + 4 * T * rot_dim
        yield Example(name, run, moved_bytes=moved, common=common)


@triton.jit
def _normed(a, b, rest, weights, eps, offset, at_a, at_b, at_rest, in_half, in_rest,
            DIM: tl.constexpr, REST_PAD: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """RMSNorm of a head that lies in parts, rounded to `dtype` as rms_norm would."""
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if REST_PAD:
        squares += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / DIM + eps)[:, None]
    weight_a = tl.load(weights + at_a, mask=in_half, other=0.0).to(tl.float32) + offset
    weight_b = tl.load(weights + at_b, mask=in_half, other=0.0).to(tl.float32) + offset
    a = (a * scale * weight_a[None, :]).to(dtype).to(tl.float32)
    b = (b * scale * weight_b[None, :]).to(dtype).to(tl.float32)
    if REST_PAD:
        weight_rest = tl.load(weights + at_rest, mask=in_rest, other=0.0).to(tl.float32) + offset
        rest = (rest * scale * weight_rest[None, :]).to(dtype).to(tl.float32)
    return a, b, rest


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_kv(
    q, k, v, out, k_pool, v_pool, cos_sin, q_weights, k_weights, positions, slots,
    num_tokens, num_heads, q_stride, q_head_stride, k_stride, k_head_stride, v_stride,
    v_head_stride, block_stride, pool_head_stride, k_inverse, v_inverse, eps, offset,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    inside = token < num_tokens
    half = tl.arange(0, HALF_PAD)
    in_half = half < HALF
    at_a, at_b = half, half + HALF
    if INTERLEAVED:
        at_a, at_b = 2 * half, 2 * half + 1
    at_rest, in_rest = half, in_half  # not used without a rest
    if REST_PAD:
        at_rest = 2 * HALF + tl.arange(0, REST_PAD)
        in_rest = at_rest < DIM

    is_query = head < num_heads
    kv_head = head - num_heads
    row = k + token * k_stride + kv_head * k_head_stride
    if is_query:
        row = q + token * q_stride + head * q_head_stride
    row = row[:, None]
    pairs = inside[:, None] & in_half[None, :]
    rests = inside[:, None] & in_rest[None, :]
    a = tl.load(row + at_a[None, :], mask=pairs, other=0.0).to(tl.float32)
    b = tl.load(row + at_b[None, :], mask=pairs, other=0.0).to(tl.float32)
    rest = a  # not used without a rest
    if REST_PAD:
        rest = tl.load(row + at_rest[None, :], mask=rests, other=0.0).to(tl.float32)
    if NORMS:
        weights = k_weights
        if is_query:
            weights = q_weights
        a, b, rest = _normed(
            a, b, rest, weights, eps, offset, at_a, at_b, at_rest, in_half, in_rest,
            DIM, REST_PAD, q.dtype.element_ty,
        )  # fmt: skip

    position = tl.load(positions + token, mask=inside, other=0)
    angle = cos_sin + position[:, None] * (2 * HALF) + half[None, :]
    cos = tl.load(angle, mask=pairs, other=0.0)
    sin = tl.load(angle + HALF, mask=pairs, other=0.0)
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin

    if is_query:
        dtype: tl.constexpr = out.dtype.element_ty
        to = out + ((token * num_heads + head) * DIM)[:, None]
        tl.store(to + at_a[None, :], turned_a.to(dtype), mask=pairs)
        tl.store(to + at_b[None, :], turned_b.to(dtype), mask=pairs)
        if REST_PAD:
            tl.store(to + at_rest[None, :], rest.to(dtype), mask=rests)
    else:
        kv_dtype: tl.constexpr = k_pool.dtype.element_ty
        slot = tl.load(slots + token, mask=inside, other=-1)
        kept = (slot >= 0)[:, None]
        place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * DIM
        place = (place + kv_head * pool_head_stride)[:, None]
        to_a, to_b = k_pool + place + at_a[None, :], k_pool + place + at_b[None, :]
        tl.store(to_a, narrow(turned_a * k_inverse, kv_dtype), mask=pairs & kept)
        tl.store(to_b, narrow(turned_b * k_inverse, kv_dtype), mask=pairs & kept)
        if REST_PAD:
            to_rest = k_pool + place + at_rest[None, :]
            tl.store(to_rest, narrow(rest * k_inverse, kv_dtype), mask=rests & kept)
        d = tl.arange(0, DIM_PAD)
        values = inside[:, None] & (d < DIM)[None, :]
        from_v = (v + token * v_stride + kv_head * v_head_stride)[:, None] + d[None, :]
        value = tl.load(from_v, mask=values, other=0.0).to(tl.float32)
        tl.store(
            v_pool + place + d[None, :], narrow(value * v_inverse, kv_dtype), mask=values & kept
        )
