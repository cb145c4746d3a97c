"""Triton form of rng.py: the same bits, from unsigned arithmetic that wraps around.

What other kernels draw with is `bits_of` and `gumbel_of`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.launch import launch
from tokenfleet.kernels.gpu.registry import Example

TILE = 1024


def bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """See rng.py; tokens [N] or [1, N]."""
    rows, count = keys.shape[0], tokens.shape[-1]
    out = torch.empty((rows, count), dtype=torch.int32, device=keys.device)
    grid = (rows, triton.cdiv(count, TILE))
    launch(_bits, grid, keys.contiguous(), tokens.contiguous(), out, count, TILE=TILE)
    return out


def examples(device: torch.device) -> Iterator[Example]:
    """The bits of one row."""
    keys = torch.zeros((1, 2), dtype=torch.int32, device=device)
    tokens = torch.zeros(151936, dtype=torch.int32, device=device)
    yield Example("bits 1x151936", lambda: bits(keys, tokens), moved_bytes=8 * 151936)


@triton.jit
def _mix32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def bits_of(first_key, second_key, token):
    """uint32 bits for int32 keys and token ids."""
    x = token.to(tl.uint32, bitcast=True) ^ first_key.to(tl.uint32, bitcast=True)
    return _mix32(_mix32(x) ^ second_key.to(tl.uint32, bitcast=True))


@triton.jit
def gumbel_of(bits):
    """Standard Gumbel noise from uint32 bits."""
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _bits(keys, tokens, out, count, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < count
    token = tl.load(tokens + at, mask=inside, other=0)
    drawn = bits_of(tl.load(keys + row * 2), tl.load(keys + row * 2 + 1), token)
    tl.store(out + row * count + at, drawn.to(tl.int32, bitcast=True), mask=inside)
