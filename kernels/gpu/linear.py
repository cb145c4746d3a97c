"""Triton form of linear.py, for what the vendor's library has no product: FP8 in blocks, FP8
weights with wide activations, FP8 on generations before it; and few rows, split over K.

What is multiplied by torch (`torch._scaled_mm` in FP8, `torch.nn.functional.linear`) and what here,
is decided by shapes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.fp8 import FP8, Fp8Rows, Fp8Scales, quantize_inputs
from tokenfleet.kernels.gpu.fp8 import empty_rows, make_scales
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.product import (
    operand_arguments,
    pick_splits,
    pick_tiles,
    scaled,
    sum_of_products,
)
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.gpu.row import row_linear

logger = logging.getLogger("tokenfleet.kernels")

SKINNY_ROWS = {80: 0, 90: 0, 100: 0}
"""Rows up to which a 16 bit product of several rows is ours and not cuBLAS's, by generation: none,
until somebody has measured where ours is faster (`skinny` in the examples). One row always is."""
JOIN_TILE = 1024
COMMON = ((1, "blocks"), (4096, "blocks"), (4096, "weights only"))
"""The examples that are compiled in every run of the suite: rows, form."""


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether a product without FP8 is computed here."""
    few = x.shape[0] == 1 or 0 < x.shape[0] <= SKINNY_ROWS[gpu_of(x.device).arch]
    return few and x.dtype == weight.dtype and x.itemsize == 2


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] times weight [N, K], + bias, where `takes` says so."""
    if x.shape[0] > 1:
        return product(x, weight, None, bias)
    return row_linear(x, weight, bias, norm=None, eps=0.0, offset=0.0, add=None, gate=None)


def fp8_linear(
    x: Tensor | Fp8Rows, codes: Tensor, scales: Fp8Scales, bias: Tensor | None
) -> Tensor:
    """See fp8.reference."""
    if scales.activations != "none" and isinstance(x, Tensor):
        x = quantize_inputs(x, scales)
    if isinstance(x, Fp8Rows) and _torch_takes(x, codes, scales):
        return _scaled_by_torch(x, codes, scales, bias)
    return product(x, codes, scales, bias)


def _scaled_by_torch(x: Fp8Rows, codes: Tensor, scales: Fp8Scales, bias: Tensor | None) -> Tensor:
    return torch._scaled_mm(
        x.codes, codes.t(), x.scale.contiguous(), scales.weight.t(), bias, out_dtype=x.dtype
    )


def _torch_takes(x: Fp8Rows, codes: Tensor, scales: Fp8Scales) -> bool:
    """Whether torch's scaled product has this form: scales by row, bf16 results, whole vectors."""
    N, K = codes.shape
    return (
        codes.is_cuda
        and gpu_of(codes.device).native_fp8
        and (scales.rows, scales.columns) == (1, K)
        and x.dtype == torch.bfloat16
        and N % 16 == K % 16 == 0
        and x.codes.shape[0] > 0
        and torch_has_product(codes.device)
    )


@lru_cache
def torch_has_product(device: torch.device) -> bool:
    """Whether torch's scaled product by rows works on this device: tried once, before anything is
    captured, since which library computes it changes with torch, CUDA and the generation."""
    scales = make_scales(256, 256, "token", device)
    codes = torch.zeros((256, 256), dtype=torch.uint8, device=device).view(FP8)
    bias = torch.zeros(256, dtype=torch.bfloat16, device=device)
    try:
        for rows in (1, 48):
            x = empty_rows(rows, 256, scales, bias)
            x.scale.fill_(1.0)
            for each in (None, bias):
                _scaled_by_torch(x, codes, scales, each)
    except (RuntimeError, ValueError) as error:
        logger.warning("products in FP8 by rows run in Triton, torch has none here: %s", error)
        return False
    return True


def product(
    x: Tensor | Fp8Rows, weight: Tensor, scales: Fp8Scales | None, bias: Tensor | None
) -> Tensor:
    """x [M, K] times weight [N, K], + bias [N]; a sum over K may be split, and is then joined in a
    fixed order."""
    if isinstance(x, Tensor) and x.stride(1) != 1:
        x = x.contiguous()
    values = x.codes if isinstance(x, Fp8Rows) else x
    (M, K), N = values.shape, weight.shape[0]
    gpu = gpu_of(values.device)
    tiles = pick_tiles(gpu, x, weight, M)
    programs = triton.cdiv(M, tiles.m) * triton.cdiv(N, tiles.n)
    splits = pick_splits(gpu, programs, K, tiles)
    per_split = triton.cdiv(triton.cdiv(K, tiles.k), splits) * tiles.k
    splits = triton.cdiv(K, per_split)
    out = torch.empty((M, N), dtype=x.dtype, device=values.device)
    sums = out
    if splits > 1:
        sums = torch.empty((splits, M, N), dtype=torch.float32, device=values.device)
    operands, constants = operand_arguments(x, weight, scales, gpu)
    launch(
        _product, (programs, splits), *operands, bias if splits == 1 else None, sums, M, N,
        per_split, **constants, SPLIT=splits > 1, EVEN=K % tiles.k == 0, TILE_M=tiles.m,
        TILE_N=tiles.n, TILE_K=tiles.k, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        grid = (triton.cdiv(M * N, JOIN_TILE),)
        launch(_join, grid, sums, bias, out, M * N, N, splits, TILE=JOIN_TILE)
    return out


def examples(device: torch.device) -> Iterator[Example]:
    """The output projection of an 8B and a 32B model: decodes, small chunks, large ones."""
    bf16 = torch.bfloat16
    for N, K in ((4096, 4096), (5120, 25600)):
        for tokens in (1, 32, 64, 4096):
            shape, flops = f"{tokens}x{K}x{N}", 2 * tokens * N * K
            x = torch.zeros((tokens, K), dtype=bf16, device=device)
            codes = torch.zeros((N, K), dtype=torch.uint8, device=device).view(FP8)
            for form in ("blocks", "rows", "weights only"):
                scales = make_scales(K, N, "token", device, block=form == "blocks")
                given: Tensor | Fp8Rows = x
                if form != "weights only":
                    given = empty_rows(tokens, K, scales, x)

                def run(
                    x: Tensor | Fp8Rows = given, codes: Tensor = codes, s: Fp8Scales = scales
                ) -> None:
                    product(x, codes, s, None)

                moved = tokens * K * (1 if form != "weights only" else 2) + N * K + 2 * tokens * N
                common = K == 4096 and (tokens, form) in COMMON
                yield Example(f"fp8 product {form} {shape}", run, moved, flops, common=common)
            if tokens <= 64:
                weight = torch.zeros((N, K), dtype=bf16, device=device)

                def skinny(x: Tensor = x, weight: Tensor = weight) -> None:
                    product(x, weight, None, None)

                moved = 2 * (tokens * K + N * K + tokens * N)
                common = K == 4096 and tokens == 64
                yield Example(f"skinny bf16 {shape}", skinny, moved, flops, common=common)


@triton.jit(do_not_specialize=["M"])
def _product(
    x, weight, x_scale, w_scale, columns, x_stride, x_scale_stride, x_group_stride, w_scale_stride,
    bias, out, M, N, per_split,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    # neighbours share a weight tile: rows change first
    tiles_m = tl.cdiv(M, TILE_M)
    tile, split = tl.program_id(0), tl.program_id(1)
    m = (tile % tiles_m) * TILE_M + tl.arange(0, TILE_M)
    n = (tile // tiles_m) * TILE_N + tl.arange(0, TILE_N)
    m_inside, n_inside = m < M, n < N
    begin = split * per_split
    x_scale_row = m.to(tl.int64) * x_scale_stride
    w_scale_row = (n // SCALE_ROWS).to(tl.int64) * w_scale_stride
    total = sum_of_products(
        x, weight, x_scale, w_scale, columns, begin, tl.minimum(begin + per_split, columns),
        m.to(tl.int64) * x_stride, n.to(tl.int64) * columns, x_scale_row, w_scale_row,
        m_inside, n_inside, x_group_stride,
        SCALES, SCALE_COLUMNS, NATIVE, EVEN, TILE_M, TILE_N, TILE_K,
    )  # fmt: skip
    total = scaled(total, x_scale, w_scale, x_scale_row, w_scale_row, m_inside, n_inside, SCALES)
    if bias is not None:
        total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    if SPLIT:
        place += split.to(tl.int64) * M * N
    tl.store(
        out + place, total.to(out.dtype.element_ty), mask=m_inside[:, None] & n_inside[None, :]
    )


@triton.jit(do_not_specialize=["splits"])
def _join(sums, bias, out, count, N, splits, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    total = tl.zeros((TILE,), tl.float32)
    place = sums + at
    for _ in range(splits):
        total += tl.load(place, mask=inside, other=0.0)
        place += count
    if bias is not None:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
