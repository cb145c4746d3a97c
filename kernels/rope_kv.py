"""Rotary embedding of q and k, and the write of k and v into the paged cache, as one operation.

Only the slots named by the batch are written; slot -1 writes nothing, so a padding row cannot
touch a block.
"""

import torch
from torch import Tensor

from tokenfleet.kernels.backend import DTYPE_CODES, compiled
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Return rotated q [T, Hq, D]; write rotated k and v [T, Hkv, D] into the pool at batch.slots.

    cos_sin [max_pos, rot_dim] fp32: row p holds cos, then sin, of position p's rot_dim / 2 angles
    (any attention factor multiplied in). Dimensions from rot_dim on pass unrotated. Pairs are
    (i, i + rot_dim / 2), or (2i, 2i + 1) when interleaved. The rotation is computed in fp32; k and
    v are rounded to the pool's dtype. q, k, v may be views into one fused projection.
    """
    library = compiled(q)
    if library is None or not _fits(q, k, v, cos_sin, pool):
        return reference(q, k, v, cos_sin, pool, batch, interleaved=interleaved)
    tokens, q_heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    library.tf_rope_kv(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
        cos_sin.data_ptr(), cos_sin.shape[1], out.data_ptr(), pool.k.data_ptr(), pool.v.data_ptr(),
        batch.slots.data_ptr(), batch.positions.data_ptr(),
        tokens, q_heads, k.shape[1], dim, pool.block_size,
        interleaved, DTYPE_CODES[q.dtype], DTYPE_CODES[pool.k.dtype],
    )  # fmt: skip
    return out


def _fits(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, pool: KVPool) -> bool:
    """The compiled form takes one activation dtype and heads contiguous within a token."""
    dim = q.shape[2]
    return (
        q.dtype == k.dtype == v.dtype
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
        and pool.k.dtype in DTYPE_CODES
        and pool.k.is_contiguous()
        and pool.v.is_contiguous()
        and all(x.stride(2) == 1 and x.stride(1) == dim for x in (q, k, v))
    )


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    interleaved: bool = False,
) -> Tensor:
    """The specification."""
    angles = cos_sin[batch.positions]
    kept = (batch.slots >= 0).nonzero()[:, 0]
    slots = batch.slots[kept]
    block, offset = slots // pool.block_size, slots % pool.block_size
    pool.k[block, :, offset] = _rotate(k, angles, interleaved)[kept].to(pool.k.dtype)
    pool.v[block, :, offset] = v[kept].to(pool.v.dtype)
    return _rotate(q, angles, interleaved).to(q.dtype)


def _rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D], angles [T, rot_dim] -> fp32 [T, H, D]."""
    rot_dim = angles.shape[-1]
    cos, sin = angles[:, None].float().chunk(2, dim=-1)  # [T, 1, rot_dim / 2]
    turned, rest = x[..., :rot_dim].float(), x[..., rot_dim:].float()
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([pairs, rest], dim=-1)
