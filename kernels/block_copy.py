"""Copy-on-write of KV blocks: a block that several sequences share is copied before one writes.

Reads only sources and writes only targets; no block is both in one call.
"""

from torch import Tensor

from tokenfleet.kernels.backend import uses_triton
from tokenfleet.kernels.paged_attention import KVPool


def copy_blocks(pool: KVPool, sources: Tensor, targets: Tensor) -> None:
    """Keys and values of block sources[i] go to block targets[i]; int64 [N] each.

    A target of -1 copies nothing, so a list may be padded.
    """
    if uses_triton(pool.k) and pool.k_scales is None:
        from tokenfleet.kernels.gpu import block_copy as gpu

        gpu.copy_blocks(pool, sources, targets)
    else:
        reference(pool, sources, targets)


def reference(pool: KVPool, sources: Tensor, targets: Tensor) -> None:
    """The specification."""
    kept = targets >= 0
    sources, targets = sources[kept], targets[kept]
    pool.k[targets] = pool.k[sources]
    pool.v[targets] = pool.v[sources]
    for scales in (pool.k_scales, pool.v_scales):
        if scales is not None:
            scales[targets] = scales[sources]
