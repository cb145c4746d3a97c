"""RMSNorm, alone and fused with the residual sum before it.

Rows are independent: a row's result does not depend on which other rows are in the batch.
"""

import struct

import torch
from torch import Tensor

from tokenfleet.kernels.backend import DTYPE_CODES, compiled, uses_triton
from tokenfleet.kernels.fp8 import Fp8Rows, Fp8Scales, quantize_reference
from tokenfleet.kernels.linear import Int8Rows, quantize_rows
from tokenfleet.kernels.workspace import new_result

_INT8_DEPTH = 64  # Int8Rows are filled up to a multiple of this
# the argument structs of norm.cpp
_PACK = struct.Struct("@3P6q2d").pack
_PACK_ADD = struct.Struct("@5P3q2d").pack
_PACK_ADD_INT8 = struct.Struct("@6P4q2d").pack


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension.

    x [..., H] with unit stride in H; computed in fp32, rounded once to x's dtype.
    weight_offset is 1.0 for Gemma, whose checkpoints store weight - 1.
    """
    if uses_triton(x):
        from tokenfleet.kernels.gpu import norm as gpu

        return gpu.rms_norm(x, weight, eps, weight_offset)
    library = compiled(x)
    if library is None or not _fits(x, weight):
        return reference(x, weight, eps, weight_offset)
    width = x.shape[-1]
    inner, outer_stride, inner_stride = 1, width, 0
    if x.is_contiguous():
        outer = x.numel() // width
    else:
        outer, outer_stride = x.shape[0], x.stride(0)
        if x.dim() == 3:
            inner, inner_stride = x.shape[1], x.stride(1)
    out = new_result(x.shape, x.dtype)
    library.tf_rms_norm(
        _PACK(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), outer, inner, width,
            outer_stride, inner_stride, DTYPE_CODES[x.dtype], eps, weight_offset,
        )
    )  # fmt: skip
    return out


def _fits(x: Tensor, weight: Tensor) -> bool:
    """The compiled form takes contiguous rows, alone or as heads of a fused projection."""
    return (
        weight.dtype == x.dtype
        and weight.is_contiguous()
        and (x.is_contiguous() or (x.dim() <= 3 and x.stride(-1) == 1))
    )


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). The sum is rounded to x's dtype before the norm."""
    if uses_triton(x):
        from tokenfleet.kernels.gpu import norm as gpu

        return gpu.add_rms_norm(x, residual, weight, eps, weight_offset)
    library = compiled(x)
    if library is None or not _fits_sum(x, residual, weight):
        return add_reference(x, residual, weight, eps, weight_offset)
    out, total = new_result(x.shape, x.dtype), new_result(x.shape, x.dtype)
    width = x.shape[-1]
    library.tf_add_rms_norm(
        _PACK_ADD(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
            x.numel() // width, width, DTYPE_CODES[x.dtype], eps, weight_offset,
        )
    )  # fmt: skip
    return out, total


def _fits_sum(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == residual.dtype == weight.dtype
        and x.is_contiguous()
        and residual.is_contiguous()
        and weight.is_contiguous()
    )


def add_rms_norm_int8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Int8Rows, Tensor]:
    """add_rms_norm of [T, H], its norm rounded as products in int8 take it. On the CPU only."""
    library = compiled(x)
    if library is None or not _fits_sum(x, residual, weight):
        return add_int8_reference(x, residual, weight, eps, weight_offset)
    rows, width = x.shape
    values = new_result((rows, -(-width // _INT8_DEPTH) * _INT8_DEPTH), torch.int8)
    scales, total = new_result((rows,), torch.float32), new_result(x.shape, x.dtype)
    library.tf_add_rms_norm_int8(
        _PACK_ADD_INT8(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), values.data_ptr(),
            scales.data_ptr(), total.data_ptr(),
            rows, width, values.shape[1], DTYPE_CODES[x.dtype], eps, weight_offset,
        )
    )  # fmt: skip
    return Int8Rows(values, scales, (rows, width), x.dtype), total


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, scales: Fp8Scales, *, weight_offset: float = 0.0
) -> Fp8Rows:
    """rms_norm of x [T, H], rounded as the weight that `scales` belong to takes its inputs."""
    if uses_triton(x):
        from tokenfleet.kernels.gpu import norm as gpu

        return gpu.rms_norm_fp8(x, weight, eps, scales, weight_offset)
    return quantize_reference(rms_norm(x, weight, eps, weight_offset=weight_offset), scales)


def add_rms_norm_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scales: Fp8Scales,
    *,
    weight_offset: float = 0.0,
) -> tuple[Fp8Rows, Tensor]:
    """add_rms_norm of [T, H], its norm rounded like rms_norm_fp8's."""
    if uses_triton(x):
        from tokenfleet.kernels.gpu import norm as gpu

        return gpu.add_rms_norm_fp8(x, residual, weight, eps, scales, weight_offset)
    normed, total = add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset)
    return quantize_reference(normed, scales), total


def reference(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """The specification."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + weight_offset)).to(x.dtype)


def add_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The specification."""
    total = x + residual
    return reference(total, weight, eps, weight_offset), total


def add_int8_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Int8Rows, Tensor]:
    """The specification."""
    normed, total = add_reference(x, residual, weight, eps, weight_offset)
    values, scales = quantize_rows(normed)
    padded = torch.nn.functional.pad(values, (0, -normed.shape[1] % _INT8_DEPTH))
    return Int8Rows(padded, scales, (normed.shape[0], normed.shape[1]), x.dtype), total
