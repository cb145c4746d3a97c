"""Triton form of fp8.py's rounding of activations: a program owns a row, or a piece of one.

The codes are those of the reference to the bit: largest magnitude, one true division, one product,
one rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.fp8 import BLOCK, FP8, Fp8Rows, Fp8Scales
from tokenfleet.kernels.gpu.fp8_bytes import kernel_view, narrow
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example

TILE = 2048
"""Inputs that a program holds at a time; a multiple of BLOCK."""


def quantize_inputs(x: Tensor, scales: Fp8Scales) -> Fp8Rows:
    """See fp8.py; x's rows may be strided."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, columns = x.shape
    out = empty_rows(rows, columns, scales, x)
    tile = min(TILE, max(BLOCK, triton.next_power_of_2(columns)))
    pieces = 1 if scales.activations == "token" else triton.cdiv(columns, tile)
    launch(
        _quantize, (rows, pieces), x, kernel_view(out.codes, gpu_of(x.device)),
        None if scales.input is not None else out.scale, scales.input, columns, x.stride(0),
        out.scale.shape[1], MODE=scales.activations, GROUP=BLOCK, TILE=tile,
        num_warps=4 if tile < TILE else 8,
    )  # fmt: skip
    return out


def empty_rows(rows: int, columns: int, scales: Fp8Scales, like: Tensor) -> Fp8Rows:
    """Room for the rounded form of [rows, columns] values in the dtype and on the device of
    `like`; a static scale is in its place already."""
    codes = torch.empty((rows, columns), dtype=FP8, device=like.device)
    if scales.input is not None:
        return Fp8Rows(codes, scales.input.expand(rows, 1), like.dtype)
    groups = triton.cdiv(columns, BLOCK) if scales.activations == "group" else 1
    scale = torch.empty((rows, groups), dtype=torch.float32, device=like.device)
    return Fp8Rows(codes, scale, like.dtype)


def make_scales(
    columns: int, rows: int, kind: str, device: torch.device, *, block: bool = False
) -> Fp8Scales:
    """Scales of a weight [rows, columns], for examples: only their shapes mean anything."""
    if block:
        shape = (triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK))
        return Fp8Scales(torch.ones(shape, device=device), BLOCK, BLOCK, "group")
    static = torch.ones(1, device=device) if kind == "static" else None
    weight = torch.ones((rows, 1), device=device)
    return Fp8Scales(weight, 1, columns, kind, static)  # type: ignore[arg-type]


def examples(device: torch.device) -> Iterator[Example]:
    """A decode step and a chunk at the width of an 8B model, each way of rounding."""
    for tokens in (32, 4096):
        for kind in ("token", "group", "static"):
            x = torch.zeros((tokens, 4096), dtype=torch.bfloat16, device=device)
            scales = make_scales(4096, 4096, kind, device, block=kind == "group")

            def run(x: Tensor = x, scales: Fp8Scales = scales) -> None:
                quantize_inputs(x, scales)

            yield Example(f"quantize {kind} bf16 {tokens}x4096", run, moved_bytes=3 * x.numel())


@triton.jit
def scale_of(highest):
    """(scale, its inverse) of values that reach `highest`, as quantize_tokens makes them."""
    highest = tl.maximum(highest, 1e-30)
    return tl.div_rn(highest, 448.0), tl.div_rn(448.0, highest)


@triton.jit
def round_row(values, scale, MODE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Codes, still as float32, of a row's piece [TILE], and the scales [TILE / GROUP] or [1].

    `scale`: pointer to the static scale. A whole row is in the piece, or the mode is not "token".
    """
    if MODE == "static":
        made = tl.load(scale)
        codes = values * tl.div_rn(1.0, made)
    elif MODE == "token":
        made, inverse = scale_of(tl.max(tl.abs(values)))
        codes = values * inverse
    else:
        groups = tl.reshape(values, (TILE // GROUP, GROUP))
        made, inverse = scale_of(tl.max(tl.abs(groups), 1))
        codes = tl.reshape(groups * inverse[:, None], (TILE,))
    return codes, made


@triton.jit
def _quantize(
    x, codes, scale, static, columns, x_stride, groups,
    MODE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * columns
    at = tl.arange(0, TILE)
    if MODE == "token":
        highest = tl.zeros((TILE,), tl.float32)
        for start in range(0, columns, TILE):
            values = tl.load(x + start + at, mask=start + at < columns, other=0.0).to(tl.float32)
            highest = tl.maximum(highest, tl.abs(values))
        made, inverse = scale_of(tl.max(highest))
        tl.store(scale + row, made)
        for start in range(0, columns, TILE):
            inside = start + at < columns
            values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32) * inverse
            tl.store(codes + start + at, narrow(values, codes.dtype.element_ty), mask=inside)
    else:
        piece = tl.program_id(1)
        at += piece * TILE
        inside = at < columns
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        rounded, made = round_row(values, static, MODE, GROUP, TILE)
        tl.store(codes + at, narrow(rounded, codes.dtype.element_ty), mask=inside)
        if MODE == "group":
            group = piece * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            tl.store(scale + row * groups + group, made, mask=group < groups)
