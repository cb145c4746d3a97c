"""A product of one row with what goes before and behind it: norm, bias, gate, residual.

A decode step of one sequence is nothing but readings of weights, and every operation between two of
them costs more than it does. On CUDA each of these products is one launch; elsewhere the operations
run one by one, which is the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tokenfleet.kernels.activation import gelu_tanh_mul, silu_mul
from tokenfleet.kernels.backend import uses_triton
from tokenfleet.kernels.gated import gated_linear
from tokenfleet.kernels.linear import PackedWeight, linear
from tokenfleet.kernels.norm import rms_norm

GATES: dict[Callable[[Tensor], Tensor], str] = {silu_mul: "silu", gelu_tanh_mul: "gelu_tanh"}
"""Gates that have a fused form, and their names there."""


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The RMSNorm in front of a product."""

    weight: Tensor
    eps: float
    offset: float = 0.0


def takes(packed: PackedWeight) -> bool:
    """Whether `row_linear` has a fused form for this weight."""
    return packed.layout == "plain" and uses_triton(packed.data)


def row_linear(
    x: Tensor,
    packed: PackedWeight,
    *,
    norm: RowNorm | None = None,
    gate: Callable[[Tensor], Tensor] | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """x [1, in] -> add + gate(linear(norm(x))) [1, out], or out / 2 with a gate, in x's dtype.

    gate: one of GATES. What lies between the operations need not be rounded to x's dtype.
    """
    if not takes(packed):
        return reference(x, packed, norm=norm, gate=gate, add=add)
    from tokenfleet.kernels.gpu import row as gpu

    return gpu.row_linear(
        x,
        packed.data,
        packed.bias,
        norm=None if norm is None else norm.weight,
        eps=0.0 if norm is None else norm.eps,
        offset=0.0 if norm is None else norm.offset,
        add=add,
        gate=None if gate is None else GATES[gate],
    )


def reference(
    x: Tensor,
    packed: PackedWeight,
    *,
    norm: RowNorm | None = None,
    gate: Callable[[Tensor], Tensor] | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """The specification: one operation after the other."""
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset)
    x = linear(x, packed) if gate is None else gated_linear(x, packed, gate)
    return x if add is None else add + x
