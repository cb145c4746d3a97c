"""A counter-based random generator: a bit pattern is a function of (seed, choice, position, token
id).

Nothing is remembered between draws, so the noise of a token does not depend on batch, chunking,
preemption, worker or device. Integer arithmetic only, in 32 bits with wrap-around, so that torch,
C++ and Triton give the same bits.

    row key   (k0, k1) = halves of splitmix64(splitmix64(splitmix64(seed) ^ choice) ^ position)
    bits      mix32(mix32(token ^ k0) ^ k1)

splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014). mix32 is
the two-round xorshift-multiply finaliser with the constants that Wellons found to have the lowest
bias.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenfleet.kernels.backend import uses_triton

_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S1, _S2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One output of the generator with state x, elementwise on uint64."""
    with np.errstate(over="ignore"):
        z = x + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _S1
        z = (z ^ (z >> np.uint64(27))) * _S2
    return z ^ (z >> np.uint64(31))


def row_keys(
    seeds: NDArray[np.uint64], choices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Keys [R, 2] int32 of R rows, from uint64 seeds and non-negative choices and positions."""
    return keys_at(streams(seeds, choices), positions)


def streams(seeds: NDArray[np.uint64], choices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The part of a row's key that is the same at every position, uint64 [R]."""
    return splitmix64(splitmix64(seeds) ^ choices.astype(np.uint64))


def keys_at(of: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Keys [R, 2] int32 of rows of these streams."""
    h = splitmix64(of ^ positions.astype(np.uint64))
    return np.ascontiguousarray(h).view(np.int32).reshape(-1, 2)


def bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Random bits as int32, for keys int32 [R, 2] and token ids int32 broadcastable to [R, N]."""
    if uses_triton(keys) and tokens.numel() == tokens.shape[-1]:
        from tokenfleet.kernels.gpu import rng as gpu

        return gpu.bits(keys, tokens)
    x = tokens ^ keys[:, :1]
    _mix32_(x)
    x ^= keys[:, 1:]
    return _mix32_(x)


def _mix32_(x: Tensor) -> Tensor:
    """In place on int32. `>>` keeps the sign in torch, so the copied sign bits are masked off."""
    x ^= (x >> 16) & 0xFFFF
    x *= _M1
    x ^= (x >> 15) & 0x1FFFF
    x *= _M2
    x ^= (x >> 16) & 0xFFFF
    return x


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32 [R, N]: -log(-log(u))."""
    return uniform(bits(keys, tokens)).log_().neg_().log_().neg_()


def uniform(drawn: Tensor) -> Tensor:
    """fp32 strictly between 0 and 1 from int32 bits: (23 of them + 1/2) / 2^23.

    With one bit more the largest value would round to 1, its noise to infinity, and a token that is
    forbidden could win.
    """
    return ((drawn >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
