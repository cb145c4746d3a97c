"""Linear layers over weights that are laid out once for the fastest product on this machine.

A PackedWeight owns its bytes: after `pack_linear` the caller may drop the original, and no second
copy is kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] in the layout that `linear` reads."""

    out_features: int
    in_features: int
    dtype: torch.dtype  # of inputs and outputs
    layout: str  # "plain"
    data: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (self.bias.nbytes if self.bias is not None else 0)


def pack_linear(
    weight: Tensor, bias: Tensor | None = None, *, quantization: str | None = None
) -> PackedWeight:
    """Pack weight [out, in] and bias [out]; quantization None keeps the weight's dtype exactly."""
    if quantization is not None:
        raise ValueError(f"quantization must be None, got {quantization!r}")
    out_features, in_features = weight.shape
    return PackedWeight(out_features, in_features, weight.dtype, "plain", weight.contiguous(), bias)


def linear(x: Tensor, packed: PackedWeight) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype, which must be the packed weight's."""
    return reference(x, packed.data, packed.bias)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification."""
    return torch.nn.functional.linear(x, weight, bias)
