"""The ids of a step's input tokens, some of which only the device knows yet.

A pool row is written only for a slot that is named; slot -1 neither reads nor writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenfleet.kernels.backend import uses_triton


def gather_tokens(host_ids: Tensor, pool: Tensor, slots: Tensor, from_pool: Tensor) -> Tensor:
    """token_ids[i] = pool[slots[i]] if from_pool[i] else host_ids[i].

    host_ids int64 [T], pool int64 [num_slots], slots int64 [T], from_pool bool [T] -> int64 [T].
    Where from_pool is false, slots[i] may be anything. A slot of -1 gives token 0.
    """
    if uses_triton(pool):
        from tokenfleet.kernels.gpu import token_pool as gpu

        return gpu.gather_tokens(host_ids, pool, slots, from_pool)
    return gather_reference(host_ids, pool, slots, from_pool)


def scatter_tokens(token_ids: Tensor, pool: Tensor, slots: Tensor) -> None:
    """pool[slots[i]] = token_ids[i], where slots[i] is not -1.

    token_ids int64 [S], pool int64 [num_slots], slots int64 [S], no slot named twice.
    """
    if uses_triton(pool):
        from tokenfleet.kernels.gpu import token_pool as gpu

        gpu.scatter_tokens(token_ids, pool, slots)
    else:
        scatter_reference(token_ids, pool, slots)


def gather_reference(host_ids: Tensor, pool: Tensor, slots: Tensor, from_pool: Tensor) -> Tensor:
    """The specification."""
    kept = from_pool & (slots >= 0)
    pooled = torch.where(slots >= 0, pool[torch.where(kept, slots, 0)], 0)
    return torch.where(from_pool, pooled, host_ids)


def scatter_reference(token_ids: Tensor, pool: Tensor, slots: Tensor) -> None:
    """The specification."""
    kept = slots >= 0
    where = torch.where(kept, slots, 0)
    # a difference, which is nothing for a slot of -1: no count of the others is needed on the host
    pool.index_add_(0, where, torch.where(kept, token_ids - pool[where], 0))
