"""Gated activations of the fused gate-up projection: act(gate) * up.

The first half of the last dimension is the gate, the second half is up.
"""

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]: gate * sigmoid(gate) * up; computed in fp32, rounded once."""
    return silu_reference(gate_up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]: gelu(gate, tanh form) * up; computed in fp32, rounded once."""
    return gelu_reference(gate_up)


def silu_reference(gate_up: Tensor) -> Tensor:
    """The specification."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gelu_reference(gate_up: Tensor) -> Tensor:
    """The specification."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
