"""Gated activations of the fused gate-up projection: act(gate) * up.

The first half of the last dimension is the gate, the second half is up.
"""

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from tokenfleet.kernels.backend import DTYPE_CODES, compiled, uses_triton
from tokenfleet.kernels.fp8 import Fp8Rows, Fp8Scales, quantize_reference
from tokenfleet.kernels.workspace import new_result

_PACK = struct.Struct("@2P4q").pack  # the argument struct of activation.cpp


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]: gate * sigmoid(gate) * up; computed in fp32, rounded once."""
    if uses_triton(gate_up):
        from tokenfleet.kernels.gpu import activation as gpu

        return gpu.gate_mul(gate_up, "silu")
    library = compiled(gate_up)
    if library is None or not _fits(gate_up):
        return silu_reference(gate_up)
    return _gate(library.tf_silu_mul, gate_up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]: gelu(gate, tanh form) * up; computed in fp32, rounded once."""
    if uses_triton(gate_up):
        from tokenfleet.kernels.gpu import activation as gpu

        return gpu.gate_mul(gate_up, "gelu_tanh")
    library = compiled(gate_up)
    if library is None or not _fits(gate_up):
        return gelu_reference(gate_up)
    return _gate(library.tf_gelu_tanh_mul, gate_up)


def silu_mul_fp8(gate_up: Tensor, scales: Fp8Scales) -> Fp8Rows:
    """silu_mul, rounded as the weight that `scales` belong to takes its inputs."""
    if uses_triton(gate_up):
        from tokenfleet.kernels.gpu import activation as gpu

        return gpu.gate_mul_fp8(gate_up, "silu", scales)
    return quantize_reference(silu_mul(gate_up), scales)


def gelu_tanh_mul_fp8(gate_up: Tensor, scales: Fp8Scales) -> Fp8Rows:
    """gelu_tanh_mul, rounded as the weight that `scales` belong to takes its inputs."""
    if uses_triton(gate_up):
        from tokenfleet.kernels.gpu import activation as gpu

        return gpu.gate_mul_fp8(gate_up, "gelu_tanh", scales)
    return quantize_reference(gelu_tanh_mul(gate_up), scales)


def _fits(gate_up: Tensor) -> bool:
    return gate_up.dim() == 2 and gate_up.stride(1) == 1


def _gate(function: Callable[..., None], gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = new_result((rows, width), gate_up.dtype)
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
