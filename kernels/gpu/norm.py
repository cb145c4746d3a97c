"""Triton form of norm.py: a program owns whole rows, several where they are short.

The sum with the residual is rounded before the norm, and the norm before it is rounded to FP8, so
that the fused forms give what the operations one by one would.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.fp8 import BLOCK, Fp8Rows, Fp8Scales
from tokenfleet.kernels.gpu.fp8 import empty_rows, make_scales, round_row
from tokenfleet.kernels.gpu.fp8_bytes import kernel_view, narrow
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example

VALUES = 4096
"""Values that a program of short rows (heads) holds."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """See norm.py."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, weight_offset, out, None)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float
) -> tuple[Tensor, Tensor]:
    """See norm.py."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x.contiguous(), residual.contiguous(), weight, eps, weight_offset, out, total)
    return out, total


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, scales: Fp8Scales, weight_offset: float
) -> Fp8Rows:
    """See norm.py."""
    out = empty_rows(x.shape[0], x.shape[1], scales, x)
    _launch(x, None, weight, eps, weight_offset, out, None, scales)
    return out


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scales: Fp8Scales,
    weight_offset: float,
) -> tuple[Fp8Rows, Tensor]:
    """See norm.py."""
    out, total = empty_rows(x.shape[0], x.shape[1], scales, x), torch.empty_like(x)
    args = (weight, eps, weight_offset, out, total, scales)
    _launch(x.contiguous(), residual.contiguous(), *args)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    out: Tensor | Fp8Rows,
    total: Tensor | None,
    scales: Fp8Scales | None = None,
) -> None:
    if x.stride(-1) != 1 or (x.dim() > 3 and not x.is_contiguous()):
        x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    inner, inner_stride = 1, 0
    outer_stride = width
    if x.dim() == 3:  # heads of a fused projection, or a slice of one
        outer_stride, inner, inner_stride = x.stride(0), x.shape[1], x.stride(1)
    elif not x.is_contiguous():
        outer_stride = x.stride(0)
    tile = triton.next_power_of_2(width)
    if scales is not None:
        tile = max(tile, BLOCK)
    height = 1 if tile >= VALUES or scales is not None else VALUES // tile
    in_fp8 = isinstance(out, Fp8Rows)
    codes = kernel_view(out.codes, gpu_of(x.device)) if isinstance(out, Fp8Rows) else out
    scale = out.scale if isinstance(out, Fp8Rows) and scales and scales.input is None else None
    launch(
        _norm, (triton.cdiv(rows, height),), x, residual, weight.contiguous(), codes, scale,
        scales.input if scales else None, total, rows, inner, width, outer_stride, inner_stride,
        out.scale.shape[1] if isinstance(out, Fp8Rows) else 1, eps, weight_offset,
        MODE=scales.activations if scales and in_fp8 else "none", GROUP=BLOCK, HEIGHT=height,
        TILE=tile, num_warps=min(16, max(4, height * tile // 512)),
    )  # fmt: skip


def examples(device: torch.device) -> Iterator[Example]:
    """Norms of an 8B and a 32B model, and of the heads of their fused projections."""
    shapes = [(32, 4096, torch.bfloat16), (4096, 4096, torch.bfloat16), (32, 5120, torch.float16),
              (32, 1024, torch.float32)]  # fmt: skip
    for tokens, width, dtype in shapes:
        name = f"{str(dtype).removeprefix('torch.')} {tokens}x{width}"
        x = torch.zeros((tokens, width), dtype=dtype, device=device)
        weight, size = torch.zeros(width, dtype=dtype, device=device), x.nbytes

        def add(x: Tensor = x, weight: Tensor = weight) -> None:
            add_rms_norm(x, x, weight, 1e-6, 0.0)

        yield Example(f"add_rms_norm {name}", add, moved_bytes=4 * size)
        for kind in ("token", "group", "static"):
            scales = make_scales(width, width, kind, device, block=kind == "group")

            def narrowed(
                x: Tensor = x, weight: Tensor = weight, scales: Fp8Scales = scales
            ) -> None:
                add_rms_norm_fp8(x, x, weight, 1e-6, scales, 0.0)

            moved = 3 * size + x.numel()
            common = dtype == torch.bfloat16
            yield Example(f"add_rms_norm_fp8 {kind} {name}", narrowed, moved, common=common)

        def alone(x: Tensor = x, weight: Tensor = weight) -> None:
            rms_norm(x, weight, 1e-6, 0.0)

        yield Example(f"rms_norm {name}", alone, moved_bytes=2 * size)
    heads = torch.zeros((32, 48, 128), dtype=torch.bfloat16, device=device)[:, :32]
    weight = torch.zeros(128, dtype=torch.bfloat16, device=device)
    yield Example("rms_norm heads bf16 32x32x128", lambda: rms_norm(heads, weight, 1e-6, 0.0),
                  moved_bytes=4 * heads.numel())  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, residual, weight, out, scale, static, total,
    rows, inner, width, outer_stride, inner_stride, groups, eps, offset,
    MODE: tl.constexpr, GROUP: tl.constexpr, HEIGHT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < width)
    source = (row // inner) * outer_stride + (row % inner) * inner_stride + column
    target = row * width + column
    given = tl.load(x + source, mask=inside, other=0.0)
    values = given.to(tl.float32)
    if residual is not None:
        values += tl.load(residual + target, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(given.dtype)
        tl.store(total + target, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(values * values, 1) / width + eps)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    normed = (values * inverse[:, None] * gain).to(given.dtype)
    if MODE == "none":
        tl.store(out + target, normed, mask=inside)
    else:  # one row a program
        first = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, TILE)
        line = tl.reshape(normed, (TILE,)).to(tl.float32)
        codes, made = round_row(line, static, MODE, GROUP, TILE)
        tl.store(out + first * width + at, narrow(codes, out.dtype.element_ty), mask=at < width)
        if MODE == "token":
            tl.store(scale + first, made)
        if MODE == "group":
            group = tl.arange(0, TILE // GROUP)
            tl.store(scale + first * groups + group, made, mask=group < groups)
