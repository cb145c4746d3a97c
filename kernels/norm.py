"""RMSNorm, alone and fused with the residual sum before it.

Rows are independent: a row's result does not depend on which other rows are in the batch.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension.

    x [..., H] with unit stride in H; computed in fp32, rounded once to x's dtype.
    weight_offset is 1.0 for Gemma, whose checkpoints store weight - 1.
    """
    return reference(x, weight, eps, weight_offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). The sum is rounded to x's dtype before the norm.

    The caller's `residual` is given up: an implementation may return the sum in its memory.
    """
    return add_reference(x, residual, weight, eps, weight_offset)


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
