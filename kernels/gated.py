"""The gate-up projection of an MLP and its gate as one operation: act(x Wg) * (x Wu).

The weight is packed as for `linear`, the gate's outputs first, then those of up; nothing is stored
between the two where the C++ form runs.
"""

import struct
from collections.abc import Callable

from torch import Tensor

from tokenfleet.kernels.activation import gelu_tanh_mul, silu_mul
from tokenfleet.kernels.backend import DTYPE_CODES, compiled
from tokenfleet.kernels.fp8 import Fp8Rows
from tokenfleet.kernels.linear import Int8Rows, PackedWeight, linear
from tokenfleet.kernels.workspace import new_result

_PACK = struct.Struct("@2P4qPq").pack  # what gated.cpp takes after the weight

# the gates and their codes in gates.h
GATES: dict[Callable[[Tensor], Tensor], int] = {silu_mul: 0, gelu_tanh_mul: 1}


def gated_linear(
    x: Tensor | Fp8Rows | Int8Rows, packed: PackedWeight, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """x [T, in] -> gate(linear(x, packed)) [T, out / 2] in x's dtype.

    gate: silu_mul or gelu_tanh_mul. The product need not be rounded to x's dtype before the gate.
    """
    if packed.layout not in ("blocks", "int8 blocks") or isinstance(x, Fp8Rows):
        return reference(x, packed, gate)
    rows, scales = (x.values, x.scales) if isinstance(x, Int8Rows) else (x, None)
    library = compiled(rows if scales is None else scales)
    if library is None or not fits(x, rows, packed):
        return reference(x, packed, gate)
    out = new_result((x.shape[0], packed.out_features // 2), x.dtype)
    function = library.tf_gated_bf16 if packed.layout == "blocks" else library.tf_gated_int8
    function(
        packed.packed
        + _PACK(
            rows.data_ptr(), out.data_ptr(), rows.stride(0), rows.shape[0], DTYPE_CODES[x.dtype], 0,
            0 if scales is None else scales.data_ptr(), GATES[gate],
        )
    )  # fmt: skip
    return out


def reference(
    x: Tensor | Fp8Rows | Int8Rows, packed: PackedWeight, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """The specification: one operation after the other."""
    return gate(linear(x, packed))


def fits(x: Tensor | Int8Rows, rows: Tensor, packed: PackedWeight) -> bool:
    """Whether the C++ forms take x, made of `rows`. What is wrong with it is said by linear."""
    rounded = isinstance(x, Int8Rows)
    return (
        x.dtype == packed.dtype
        and x.shape[1] == packed.in_features
        and rows.stride(1) == 1
        and (not rounded or packed.layout == "int8 blocks")
    )
