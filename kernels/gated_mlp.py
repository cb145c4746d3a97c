"""A whole MLP with a gate as one operation: down(act(x Wg) * (x Wu)).

What lies between the two products never leaves the C++ form: there it is laid down as the second
product reads it, rounded to int8 where that takes int8. A row's bits are those of the two
operations one after the other.
"""

import struct
from collections.abc import Callable

from torch import Tensor

from tokenfleet.kernels.backend import DTYPE_CODES, compiled
from tokenfleet.kernels.fp8 import Fp8Rows
from tokenfleet.kernels.gated import GATES, fits, gated_linear
from tokenfleet.kernels.linear import Int8Rows, PackedWeight, linear
from tokenfleet.kernels.workspace import new_result

# what gated_mlp.cpp takes after the weight of each product, and at the end
_PACK_CALL = struct.Struct("@2P4qP").pack
_PACK_GATE = struct.Struct("@q").pack


def gated_mlp(
    x: Tensor | Fp8Rows | Int8Rows,
    gate_up: PackedWeight,
    down: PackedWeight,
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """x [T, in] -> linear(gated_linear(x, gate_up, gate), down) [T, out] in x's dtype."""
    layout = gate_up.layout
    if layout not in ("blocks", "int8 blocks") or isinstance(x, Fp8Rows):
        return reference(x, gate_up, down, gate)
    rows, scales = (x.values, x.scales) if isinstance(x, Int8Rows) else (x, None)
    library = compiled(rows if scales is None else scales)
    if library is None or not fits(x, rows, gate_up) or not _follows(down, gate_up):
        return reference(x, gate_up, down, gate)
    count, code = x.shape[0], DTYPE_CODES[x.dtype]
    out = new_result((count, down.out_features), x.dtype)
    rounded = 0 if scales is None else scales.data_ptr()
    function = library.tf_gated_mlp_bf16 if layout == "blocks" else library.tf_gated_mlp_int8
    function(
        gate_up.packed
        + _PACK_CALL(rows.data_ptr(), 0, rows.stride(0), count, code, 0, rounded)
        + down.packed
        + _PACK_CALL(0, out.data_ptr(), down.in_features, count, code, 0, 0)
        + _PACK_GATE(GATES[gate])
    )
    return out


def reference(
    x: Tensor | Fp8Rows | Int8Rows,
    gate_up: PackedWeight,
    down: PackedWeight,
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """The specification: one operation after the other."""
    return linear(gated_linear(x, gate_up, gate), down)


def _follows(down: PackedWeight, gate_up: PackedWeight) -> bool:
    """What does not is refused by `linear`."""
    return (
        down.layout == gate_up.layout
        and down.dtype == gate_up.dtype
        and 2 * down.in_features == gate_up.out_features
    )
