"""FP8 (e4m3): how weights and activations are rounded to it, and the product of the two.

A value is code x scale, and a scale is shared by a whole number of codes, never by a fraction of
one: so the product needs each scale once per code block. Codes are `torch.float8_e4m3fn` (largest
finite value 448, one NaN, no infinity); scales are fp32.

    weights      a scale per output ("rows"), or per block of 128 x 128 ("blocks")
    activations  "token": a scale per token, "group": per token and 128 inputs, both from what is
                 there; "static": one scale that the checkpoint gives; "none": not rounded

A per-tensor scale is kept as equal scales per output: that costs nothing, and the parts of a fused
projection keep their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tokenfleet.kernels.backend import uses_triton

FP8 = torch.float8_e4m3fn
MAX = 448.0
BLOCK = 128
"""Rows and columns that share a scale in the block form; inputs that do in a group."""
_LEAST = 1e-30
"""Least magnitude that a scale is made from: its inverse stays finite."""

Activations = Literal["none", "static", "token", "group"]
Form = Literal["rows", "blocks"]


@dataclass(frozen=True, slots=True)
class Fp8Scales:
    """The scales of a weight [N, K] in FP8, and how its inputs are rounded."""

    weight: Tensor
    """fp32 [ceil(N / rows), ceil(K / columns)]: scale of the codes of one block."""
    rows: int
    """Outputs that share a scale: 1, or the checkpoint's block."""
    columns: int
    """Inputs that share a scale: K, or the checkpoint's block."""
    activations: Activations
    input: Tensor | None = None
    """fp32 [1], only for static activations."""

    @property
    def num_bytes(self) -> int:
        """What reading all of them reads."""
        return self.weight.nbytes + (0 if self.input is None else self.input.nbytes)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations [T, K] as a product in FP8 takes them: code x scale."""

    codes: Tensor
    """[T, K]."""
    scale: Tensor
    """fp32 [T, G]: of each row's groups of ceil(K / G) inputs; static ones repeat one number."""
    dtype: torch.dtype
    """Of what they were made from, and of the product."""

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return BLOCK if self.scale.shape[1] > 1 else max(self.codes.shape[1], 1)

    def wide(self) -> Tensor:
        """The values, fp32 [T, K]."""
        spread = self.scale.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        return self.codes.float() * spread


def quantize_inputs(x: Tensor, scales: Fp8Scales) -> Fp8Rows:
    """x [T, K] rounded as a weight's scales say, which must not be "none"."""
    if uses_triton(x):
        from tokenfleet.kernels.gpu import fp8 as gpu

        return gpu.quantize_inputs(x, scales)
    return quantize_reference(x, scales)


def quantize_reference(x: Tensor, scales: Fp8Scales) -> Fp8Rows:
    """The specification."""
    if scales.input is not None:
        codes = quantize_static(x, scales.input)
        return Fp8Rows(codes, scales.input.expand(len(x), 1), x.dtype)
    group = BLOCK if scales.activations == "group" else None
    return Fp8Rows(*quantize_tokens(x, group), x.dtype)


def quantize_tokens(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K] -> codes [T, K] and fp32 scales [T, ceil(K / group)], group None meaning K.

    scale = max |x of the group| / 448, code = x * (448 / max), rounded to nearest even. A NaN or
    infinity makes its group NaN.
    """
    T, K = x.shape
    group = group or max(K, 1)
    groups = -(-K // group)
    wide = torch.nn.functional.pad(x.float(), (0, groups * group - K)).view(T, groups, group)
    highest = wide.abs().amax(-1).clamp_min(_LEAST)
    # true divisions, by tensors: a number may become a product with its rounded reciprocal
    most = torch.full_like(highest, MAX)
    codes = wide * (most / highest)[..., None]
    return to_codes(codes.view(T, groups * group)[:, :K]), highest / most


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """Codes of x [T, K] for one given scale; what lies beyond 448 scales is cut to it."""
    return to_codes(x.float() * (1.0 / scale.float()))


def quantize_weight(weight: Tensor, form: Form) -> tuple[Tensor, Fp8Scales]:
    """Codes and scales of a weight [N, K]: per output with token activations, or in blocks of
    128 x 128 with group activations."""
    N, K = weight.shape
    if form == "rows":
        codes, scale = quantize_tokens(weight)
        return codes, Fp8Scales(scale, 1, K, "token")
    tall, wide = -(-N // BLOCK), -(-K // BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, wide * BLOCK - K, 0, tall * BLOCK - N))
    blocks = padded.view(tall, BLOCK, wide, BLOCK)
    highest = blocks.abs().amax((1, 3)).clamp_min(_LEAST)
    most = torch.full_like(highest, MAX)
    codes = blocks * (most / highest)[:, None, :, None]
    whole = to_codes(codes.view(tall * BLOCK, wide * BLOCK)[:N, :K].contiguous())
    return whole, Fp8Scales(highest / most, BLOCK, BLOCK, "group")


def to_codes(x: Tensor) -> Tensor:
    """fp32 -> nearest codes; magnitudes above 448 give 448, NaN stays."""
    return x.clamp(-MAX, MAX).to(FP8)


def dequantize(codes: Tensor, scales: Fp8Scales) -> Tensor:
    """The weight [N, K] that codes and scales stand for, fp32."""
    N, K = codes.shape
    spread = scales.weight.repeat_interleave(scales.rows, 0)[:N]
    return codes.float() * spread.repeat_interleave(scales.columns, 1)[:, :K]


def rounded_inputs(x: Tensor | Fp8Rows, scales: Fp8Scales) -> Tensor:
    """What the product sees of x [T, K]: rounded to FP8 and back, fp32."""
    if isinstance(x, Fp8Rows):
        return x.wide()
    return x.float() if scales.activations == "none" else quantize_reference(x, scales).wide()


def reference(
    x: Tensor | Fp8Rows, codes: Tensor, scales: Fp8Scales, bias: Tensor | None = None
) -> Tensor:
    """The specification: x [T, K] rounded as the scales say, times the weight; sums in fp32,
    rounded once to x's dtype."""
    out = rounded_inputs(x, scales) @ dequantize(codes, scales).t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
