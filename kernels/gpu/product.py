"""The tile of a product x [M, K] times weight [N, K], that `linear` and `moe` are made of.

A program sums a TILE_M x TILE_N tile over a range of K. Operands are fp32, fp16, bf16 or FP8 codes;
codes are multiplied as they are where the generation can, otherwise as fp16, which holds every one
of them. Block scales are applied to each block's sum, so no sum in FP8's narrow accumulators is
longer than one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.fp8 import BLOCK, Fp8Rows, Fp8Scales
from tokenfleet.kernels.gpu.fp8_bytes import kernel_view, widen
from tokenfleet.kernels.gpu.launch import Gpu


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program's tile and how it is launched."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


TILES = {
    # (operands, rows): not measured yet; chosen to fill the memory pipeline without spills
    ("16 bit", 16): Tiles(16, 64, 64, 4, 6),
    ("16 bit", 32): Tiles(32, 64, 64, 4, 6),
    ("16 bit", 64): Tiles(64, 64, 64, 4, 4),
    ("16 bit", 128): Tiles(128, 128, 64, 8, 3),
    ("8 bit", 16): Tiles(16, 64, 128, 4, 4),
    ("8 bit", 32): Tiles(32, 64, 128, 4, 4),
    ("8 bit", 64): Tiles(64, 64, 128, 4, 4),
    ("8 bit", 128): Tiles(128, 128, 128, 8, 3),
    ("8 bit widened", 16): Tiles(16, 64, 128, 4, 4),
    ("8 bit widened", 32): Tiles(32, 64, 128, 4, 4),
    ("8 bit widened", 64): Tiles(64, 64, 128, 4, 4),
    ("8 bit widened", 128): Tiles(128, 64, 128, 8, 3),
    ("mixed", 16): Tiles(16, 64, 128, 4, 4),
    ("mixed", 32): Tiles(32, 64, 128, 4, 4),
    ("mixed", 64): Tiles(64, 64, 128, 4, 3),
    ("mixed", 128): Tiles(128, 64, 128, 8, 2),
    ("32 bit", 16): Tiles(16, 32, 64, 4, 2),
    ("32 bit", 32): Tiles(32, 32, 32, 4, 2),
    ("32 bit", 64): Tiles(64, 32, 32, 4, 2),
    ("32 bit", 128): Tiles(64, 64, 32, 8, 2),
}
"""Operands: both "8 bit" codes, multiplied as such or widened first; "mixed": wide activations with
codes for weights; or both wide."""
MAX_SPLITS = 16
SPLIT_TILES = 4
"""Least tiles of K that a program sums: shorter sums cost more in joining than they gain."""


def pick_tiles(gpu: Gpu, x: Tensor | Fp8Rows, weight: Tensor, rows: int) -> Tiles:
    """The tile for `rows` rows; in the block form K goes by blocks."""
    if isinstance(x, Fp8Rows):
        operands = "8 bit" if gpu.native_fp8 else "8 bit widened"
    elif weight.dtype == torch.float8_e4m3fn:
        operands = "mixed" if x.dtype != torch.float32 else "32 bit"
    else:
        operands = "16 bit" if x.itemsize == 2 else "32 bit"
    height = next((m for m in (16, 32, 64) if rows <= m), 128)
    return TILES[operands, height]


def pick_splits(gpu: Gpu, programs: int, columns: int, tiles: Tiles) -> int:
    """Among how many programs a tile's sum over K is divided, so that the GPU is full."""
    most = max(1, triton.cdiv(columns, tiles.k) // SPLIT_TILES)
    wanted: int = min(MAX_SPLITS, most, 2 * gpu.num_sms // max(programs, 1))
    return max(1, wanted)


def operand_arguments(
    x: Tensor | Fp8Rows, weight: Tensor, scales: Fp8Scales | None, gpu: Gpu
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `sum_of_products` asks for, and its constants."""
    in_fp8 = isinstance(x, Fp8Rows)
    codes = x.codes if isinstance(x, Fp8Rows) else x
    x_scale = x.scale if isinstance(x, Fp8Rows) else None
    columns = codes.shape[1]
    by_block = scales is not None and scales.columns < columns
    arguments = (
        kernel_view(codes, gpu), kernel_view(weight, gpu), x_scale,
        scales.weight if scales is not None else None, columns, codes.stride(0),
        x_scale.stride(0) if x_scale is not None else 0,
        x_scale.stride(1) if x_scale is not None and x_scale.shape[1] > 1 else 0,
        scales.weight.stride(0) if scales is not None else 0,
    )  # fmt: skip
    constants = {
        "SCALES": "blocks" if by_block else "rows" if scales is not None else "none",
        "SCALE_ROWS": scales.rows if scales is not None else 1,
        "SCALE_COLUMNS": BLOCK,
        "NATIVE": in_fp8 and gpu.native_fp8,
    }
    return arguments, constants


@triton.jit
def sum_of_products(
    x, weight, x_scale, w_scale, columns, begin, end, x_row, w_row, x_scale_row, w_scale_row,
    x_inside, w_inside, x_group_stride,
    SCALES: tl.constexpr, SCALE_COLUMNS: tl.constexpr, NATIVE: tl.constexpr,
    EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """float32 [TILE_M, TILE_N]: sums over columns begin..end; block scales applied, others not.

    x_row, w_row: int64 offsets of the tile's rows. EVEN: TILE_K divides `columns`.
    """
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(begin, end, TILE_K):
        k = start + tl.arange(0, TILE_K)
        if EVEN:
            a = tl.load(x + x_row[:, None] + k[None, :], mask=x_inside[:, None], other=0.0)
            b = tl.load(weight + w_row[None, :] + k[:, None], mask=w_inside[None, :], other=0.0)
        else:
            deep = k < columns
            a = tl.load(
                x + x_row[:, None] + k[None, :], mask=x_inside[:, None] & deep[None, :], other=0.0
            )
            b = tl.load(
                weight + w_row[None, :] + k[:, None],
                mask=w_inside[None, :] & deep[:, None],
                other=0.0,
            )
        if not NATIVE:
            if a.dtype.primitive_bitwidth == 8:
                a = widen(a, tl.float16)
            if b.dtype.primitive_bitwidth == 8:
                b = widen(b, a.dtype)
        if SCALES == "blocks":
            part = tl.dot(a, b, input_precision="ieee")
            group = start // SCALE_COLUMNS
            b_factor = tl.load(w_scale + w_scale_row + group, mask=w_inside, other=0.0)
            if x_scale is not None:
                place = x_scale + x_scale_row + group * x_group_stride
                a_factor = tl.load(place, mask=x_inside, other=0.0)
                part = part * a_factor[:, None]
            total += part * b_factor[None, :]
        else:
            total = tl.dot(a, b, total, input_precision="ieee", max_num_imprecise_acc=TILE_K)
    return total


@triton.jit
def scaled(
    total, x_scale, w_scale, x_scale_row, w_scale_row, x_inside, w_inside, SCALES: tl.constexpr
):
    """The sums times the scales of their row and column, where scales go by rows."""
    if SCALES == "rows":
        total = total * tl.load(w_scale + w_scale_row, mask=w_inside, other=0.0)[None, :]
        if x_scale is not None:
            total = total * tl.load(x_scale + x_scale_row, mask=x_inside, other=0.0)[:, None]
    return total
