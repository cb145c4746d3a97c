"""Gated activations of the fused gate-up projection: act(gate) * up.

The first half of the last dimension is the gate, the second half is up.
"""

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from tokenfleet.kernels.backend import DTYPE_CODES, compiled

_PACK = struct.Struct("@2P4q").pack  # the argument struct of activation.cpp


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]: gate * sigmoid(gate) * up; computed in fp32, rounded once."""
    library = compiled(gate_up)
    if library is None or not _fits(gate_up):
        return silu_reference(gate_up)
    return _gate(library.tf_silu_mul, gate_up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]: gelu(gate, tanh form) * up; computed in fp32, rounded once."""
    library = compiled(gate_up)
    if library is None or not _fits(gate_up):
        return gelu_reference(gate_up)
    return _gate(library.tf_gelu_tanh_mul, gate_up)


def _fits(gate_up: Tensor) -> bool:
    return gate_up.dim() == 2 and gate_up.stride(1) == 1


def _gate(function: Callable[..., None], gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    function(
        _PACK(
            gate_up.data_ptr(), out.data_ptr(), rows, width, gate_up.stride(0),
            DTYPE_CODES[gate_up.dtype],
        )
    )  # fmt: skip
    return out


def silu_reference(gate_up: Tensor) -> Tensor:
    """The specification."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_reference(gate_up: Tensor) -> Tensor:
    """The specification."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
