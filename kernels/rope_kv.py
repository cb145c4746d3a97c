"""Rotary embedding of q and k, and the write of k and v into the paged cache, as one operation;
before it, where a model has them, RMSNorms of each query and key head.

Only the slots named by the batch are written; slot -1 writes nothing, so a padding row cannot
touch a block.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenfleet.kernels.backend import DTYPE_CODES, compiled, uses_triton
from tokenfleet.kernels.fp8 import FP8, to_codes
from tokenfleet.kernels.linear import quantize_rows
from tokenfleet.kernels.norm import rms_norm
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.workspace import new_result

_PACK = struct.Struct("@3P3q2P5q").pack  # what rope_kv.cpp takes after the pool and the batch


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms over single heads, in x's dtype."""

    q: Tensor  # [D]
    k: Tensor  # [D]
    eps: float
    offset: float = 0.0  # added to the weights, see rms_norm


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Return rotated q [T, Hq, D]; write rotated k and v [T, Hkv, D] into the pool at batch.slots.

    cos_sin [max_pos, rot_dim] fp32: row p holds cos, then sin, of position p's rot_dim / 2 angles
    (any attention factor multiplied in). Dimensions from rot_dim on pass unrotated. Pairs are
    (i, i + rot_dim / 2), or (2i, 2i + 1) when interleaved. The rotation is computed in fp32; k and
    v are rounded to the pool's dtype (FP8: over its scales; int8: over a scale of each row, which
    is stored too). q, k, v may be views into one fused projection. With norms, q and k are what
    rms_norm makes of them. A padding row has slot -1 and a position within the table.
    """
    if uses_triton(q) and pool.k_scales is None:
        from tokenfleet.kernels.gpu import rope_kv as gpu

        return gpu.rope_and_write_kv(
            q, k, v, cos_sin, pool, batch, interleaved=interleaved, norms=norms
        )
    if norms is not None:
        q = rms_norm(q, norms.q, norms.eps, weight_offset=norms.offset)
        k = rms_norm(k, norms.k, norms.eps, weight_offset=norms.offset)
    library = compiled(q)
    shared = pool.packed() if library else b""
    if library is None or not shared or not _fits(q, k, v, cos_sin):
        return reference(q, k, v, cos_sin, pool, batch, interleaved=interleaved)
    out = new_result(q.shape, q.dtype)
    library.tf_rope_kv(
        shared
        + batch.packed()
        + _PACK(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            cos_sin.data_ptr(), out.data_ptr(), cos_sin.shape[1], q.shape[0], q.shape[1],
            interleaved, DTYPE_CODES[q.dtype],
        )
    )  # fmt: skip
    return out


def _fits(q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> bool:
    """The compiled form takes one activation dtype and heads contiguous within a token."""
    within = (q.shape[2], 1)
    return (
        q.dtype == k.dtype == v.dtype
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
        and q.stride()[1:] == within
        and k.stride()[1:] == within
        and v.stride()[1:] == within
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
    turned = _rotate(k, angles, interleaved)
    if pool.k_scales is not None and pool.v_scales is not None:
        _write_codes(pool.k, pool.k_scales, turned, batch.slots)
        _write_codes(pool.v, pool.v_scales, v, batch.slots)
    else:
        _write(pool.k, _stored(turned, pool.k, pool.k_scale), batch.slots)
        _write(pool.v, _stored(v, pool.v, pool.v_scale), batch.slots)
    return _rotate(q, angles, interleaved).to(q.dtype)


def _write_codes(blocks: Tensor, scales: Tensor, x: Tensor, slots: Tensor) -> None:
    codes, scale = quantize_rows(x.reshape(-1, x.shape[2]))
    _write(blocks, codes.view(x.shape), slots)
    _write(scales, scale.view(x.shape[:2]), slots)


def _write(blocks: Tensor, values: Tensor, slots: Tensor) -> None:
    """Rows of slot -1 write what is there already: so the host need not know how many they are."""
    kept, at = (slots >= 0).view(-1, *[1] * (values.ndim - 1)), slots.clamp(min=0)
    where = at // blocks.shape[2], slice(None), at % blocks.shape[2]
    if blocks.dtype == FP8:
        blocks, values = blocks.view(torch.uint8), values.view(torch.uint8)
    blocks[where] = torch.where(kept, values, blocks[where])


def _stored(x: Tensor, blocks: Tensor, scale: float) -> Tensor:
    """x as the pool keeps it."""
    return to_codes(x.float() * (1.0 / scale)) if blocks.dtype == FP8 else x.to(blocks.dtype)


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
