"""Triton form of activation.py: a program owns a piece of a row, or the whole of it where it is to
be rounded by its largest magnitude.

The product is rounded to the activations' dtype before it is rounded to FP8, as one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.fp8 import BLOCK, Fp8Rows, Fp8Scales
from tokenfleet.kernels.gpu.fp8 import empty_rows, make_scales, round_row, scale_of
from tokenfleet.kernels.gpu.fp8_bytes import kernel_view, narrow
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example

TILE = 1024
"""Columns that a program holds at a time; a multiple of BLOCK."""


def gate_mul(gate_up: Tensor, kind: str) -> Tensor:
    """act(gate) * up for [T, 2I]; kind: "silu" or "gelu_tanh"."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    launch(
        _gate, (rows, triton.cdiv(width, TILE)), gate_up, out, None, None, width,
        gate_up.stride(0), 1, KIND=kind, MODE="none", GROUP=BLOCK, TILE=TILE, num_warps=4,
    )  # fmt: skip
    return out


def gate_mul_fp8(gate_up: Tensor, kind: str, scales: Fp8Scales) -> Fp8Rows:
    """gate_mul, rounded to FP8."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty_rows(rows, width, scales, gate_up)
    pieces = 1 if scales.activations == "token" else triton.cdiv(width, TILE)
    launch(
        _gate, (rows, pieces), gate_up, kernel_view(out.codes, gpu_of(gate_up.device)),
        None if scales.input is not None else out.scale, scales.input, width, gate_up.stride(0),
        out.scale.shape[1], KIND=kind, MODE=scales.activations, GROUP=BLOCK, TILE=TILE,
        num_warps=4,
    )  # fmt: skip
    return out


def examples(device: torch.device) -> Iterator[Example]:
    """The MLP of an 8B model, in a decode step and in a chunk."""
    for tokens in (32, 4096):
        gate_up = torch.zeros((tokens, 2 * 12288), dtype=torch.bfloat16, device=device)
        for kind in ("silu", "gelu_tanh"):
            name, size = f"bf16 {tokens}x12288", gate_up.numel()

            def run(gate_up: Tensor = gate_up, kind: str = kind) -> None:
                gate_mul(gate_up, kind)

            yield Example(f"{kind}_mul {name}", run, moved_bytes=3 * size)
            for mode in ("token", "group", "static"):
                scales = make_scales(12288, 4096, mode, device, block=mode == "group")

                def narrowed(
                    gate_up: Tensor = gate_up, kind: str = kind, scales: Fp8Scales = scales
                ) -> None:
                    gate_mul_fp8(gate_up, kind, scales)

                common = kind == "silu"
                moved = 2 * size + size // 2
                yield Example(f"{kind}_mul_fp8 {mode} {name}", narrowed, moved, common=common)


@triton.jit
def _gated(gate_up, at, width, KIND: tl.constexpr):
    """act(gate) * up at these columns, rounded to the dtype of gate_up; 0 outside."""
    inside = at < width
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + at, mask=inside, other=0.0)
    if KIND == "silu":
        opened = gate * tl.sigmoid(gate)
    else:  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        opened = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (opened * up.to(tl.float32)).to(up.dtype)


@triton.jit
def _gate(
    gate_up, out, scale, static, width, stride, groups,
    KIND: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * stride
    out += row * width
    column = tl.arange(0, TILE)
    if MODE == "token":  # once for the largest magnitude, once for the codes
        highest = tl.zeros((TILE,), tl.float32)
        for start in range(0, width, TILE):
            values = _gated(gate_up, start + column, width, KIND).to(tl.float32)
            highest = tl.maximum(highest, tl.abs(values))
        made, inverse = scale_of(tl.max(highest))
        tl.store(scale + row, made)
        for start in range(0, width, TILE):
            at = start + column
            values = _gated(gate_up, at, width, KIND).to(tl.float32) * inverse
            tl.store(out + at, narrow(values, out.dtype.element_ty), mask=at < width)
    else:
        piece = tl.program_id(1)
        at = piece * TILE + column
        values = _gated(gate_up, at, width, KIND)
        if MODE == "none":
            tl.store(out + at, values, mask=at < width)
        else:
            codes, made = round_row(values.to(tl.float32), static, MODE, GROUP, TILE)
            tl.store(out + at, narrow(codes, out.dtype.element_ty), mask=at < width)
            if MODE == "group":
                group = piece * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
                tl.store(scale + row * groups + group, made, mask=group < groups)
