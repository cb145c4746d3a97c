"""float8_e4m3fn inside kernels, for every generation.

Triton has the type from sm_89 on. Below, kernels get the bytes and convert them here, exactly as
the hardware would: round to nearest even, saturate at 448, keep NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.launch import Gpu


def kernel_view(x: Tensor, gpu: Gpu) -> Tensor:
    """x as a kernel for this GPU takes it: float8 as bytes where Triton lacks the type."""
    if x.dtype == torch.float8_e4m3fn and not gpu.native_fp8:
        return x.view(torch.uint8)
    return x


@triton.jit
def widen(x, dtype: tl.constexpr):
    """Values of float8 or its bytes as `dtype`; anything else is converted as usual."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), half).to(dtype)
    return x.to(dtype)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to `dtype`: float8 saturates, uint8 means the bytes of float8."""
    if dtype == tl.uint8:
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.uint32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        # below 2^-6 the step is 2^-9, which is the step of floats just above 2^14
        tiny = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, tiny, normal - 960)
        code = tl.where(x != x, 0x7F, code)
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        return (code | sign).to(tl.uint8)
    if dtype == tl.float8e4nv:
        return tl.where(x != x, x, tl.clamp(x, -448.0, 448.0)).to(dtype)
    return x.to(dtype)
