"""Triton form of token_pool.py: one element a lane, no dot."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.launch import launch
from tokenfleet.kernels.gpu.registry import Example

TILE = 256


def gather_tokens(host_ids: Tensor, pool: Tensor, slots: Tensor, from_pool: Tensor) -> Tensor:
    """See token_pool.py. All tensors are contiguous."""
    out = torch.empty_like(host_ids)
    count = out.numel()
    grid = (triton.cdiv(count, TILE),)
    launch(_gather, grid, host_ids, pool, slots, from_pool, out, count, TILE=TILE, num_warps=4)
    return out


def scatter_tokens(token_ids: Tensor, pool: Tensor, slots: Tensor) -> None:
    """See token_pool.py. All tensors are contiguous."""
    count = slots.numel()
    launch(_scatter, (triton.cdiv(count, TILE),), token_ids, pool, slots, count, TILE=TILE)


def examples(device: torch.device) -> Iterator[Example]:
    """One decode step of 128 sequences, and a mixed one of 8192 tokens."""
    for count in (128, 8192):
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        pool = torch.zeros(1024, dtype=torch.int64, device=device)
        chosen = torch.zeros(count, dtype=torch.bool, device=device)

        def gather(ids: Tensor = ids, pool: Tensor = pool, chosen: Tensor = chosen) -> None:
            gather_tokens(ids, pool, ids, chosen)

        def scatter(ids: Tensor = ids, pool: Tensor = pool) -> None:
            scatter_tokens(ids, pool, ids)

        yield Example(f"gather_tokens {count}", gather, moved_bytes=25 * count)
        yield Example(f"scatter_tokens {count}", scatter, moved_bytes=24 * count)


@triton.jit(do_not_specialize=["count"])
def _gather(host_ids, pool, slots, from_pool, out, count, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    slot = tl.load(slots + at, mask=inside, other=-1)
    chosen = tl.load(from_pool + at, mask=inside, other=0) != 0
    pooled = tl.load(pool + slot, mask=chosen & (slot >= 0), other=0)
    given = tl.load(host_ids + at, mask=inside & ~chosen, other=0)
    tl.store(out + at, tl.where(chosen, pooled, given), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _scatter(token_ids, pool, slots, count, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    slot = tl.load(slots + at, mask=inside, other=-1)
    token = tl.load(token_ids + at, mask=inside, other=0)
    tl.store(pool + slot, token, mask=inside & (slot >= 0))
