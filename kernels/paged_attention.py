"""Attention of one step's query tokens over the paged KV cache: decodes and chunks together.

A position at or beyond a sequence's `kv_len` is never read into a result, whatever garbage (NaN
included) its block holds: blocks are handed out without being cleared.

    q [T, Hq, D]    pool.k, pool.v [num_blocks, Hkv, block_size, D]    ->    [T, Hq, D]
"""

import itertools
import struct
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenfleet.kernels.backend import DTYPE_CODES, KV_DTYPE_CODES, compiled, uses_triton
from tokenfleet.kernels.fp8 import FP8
from tokenfleet.kernels.workspace import new_result

# the structs of paged.h, and what paged_attention.cpp takes after them
_PACK_POOL = struct.Struct("@4P4q").pack
_PACK_BATCH = struct.Struct("@5P2q").pack
_PACK = struct.Struct("@3P5q2d").pack


@dataclass(frozen=True, slots=True)
class KVPool:
    """One layer's KV blocks. Head-major inside a block, so a (block, head) tile is contiguous.

    Block 0 is the null block: padding of block tables points at it, nobody owns it.

    In the dtype float8_e4m3fn a stored code c stands for c x scale: rope_and_write_kv stores the
    code nearest to fp32 x * (1 / scale), cut to +-448; attention reads c x scale. For other dtypes
    the scales are 1 and play no part.

    In int8, on a CPU only, each row (token and head) has a scale of its own, max |row| / 127, which
    rope_and_write_kv stores beside its codes, round(x / scale).
    """

    k: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    v: Tensor  # the same shape and dtype
    k_scale: float = 1.0
    v_scale: float = 1.0
    k_scales: Tensor | None = None  # int8: fp32 [num_blocks, num_kv_heads, block_size]
    v_scales: Tensor | None = None

    _packed: bytes | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def block_size(self) -> int:
        """Tokens that a block holds."""
        return self.k.shape[2]

    def packed(self) -> bytes:
        """struct Pool of paged.h, made once; empty when the C++ kernels cannot take this pool."""
        if self._packed is None:
            object.__setattr__(self, "_packed", self._pack())
        return self._packed or b""

    def _pack(self) -> bytes:
        k, v = self.k, self.v
        if k.dtype not in KV_DTYPE_CODES or not (k.is_contiguous() and v.is_contiguous()):
            return b""
        _, heads, block_size, dim = k.shape
        scales = (0 if x is None else x.data_ptr() for x in (self.k_scales, self.v_scales))
        return _PACK_POOL(
            k.data_ptr(), v.data_ptr(), *scales, heads, block_size, dim, KV_DTYPE_CODES[k.dtype]
        )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's tokens, sequence after sequence; the `num_decodes` first ones have one token each.

    Sequence s owns the query rows query_starts[s] : query_starts[s + 1]; they are the last ones of
    its kv_lens[s] tokens. A padding row has kv_len 0 and slot -1.
    """

    query_starts: Tensor  # int32 [S + 1]
    kv_lens: Tensor  # int32 [S]: tokens in the cache after this step's writes
    block_tables: Tensor  # int32 [S, M], padded with 0 (the null block)
    slots: Tensor  # int64 [T]: block * block_size + offset of a token's K and V; -1 writes nothing
    positions: Tensor  # int64 [T]: a token's position in its sequence (rotary embedding)
    num_decodes: int
    max_query_len: int
    max_kv_len: int
    _packed: bytes | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def num_sequences(self) -> int:
        """S, padding included."""
        return self.kv_lens.shape[0]

    def packed(self) -> bytes:
        """struct Batch of paged.h, made once; the tensors themselves are read at every call."""
        if self._packed is None:
            object.__setattr__(self, "_packed", self._pack())
        return self._packed or b""

    def _pack(self) -> bytes:
        return _PACK_BATCH(
            self.query_starts.data_ptr(), self.kv_lens.data_ptr(), self.block_tables.data_ptr(),
            self.slots.data_ptr(), self.positions.data_ptr(),
            self.block_tables.stride(0), self.kv_lens.shape[0],
        )  # fmt: skip


def paged_attention(
    q: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention; softmax in fp32, result in q's dtype.

    scale: factor on q k^T. window w: a token sees the last w tokens, itself included.
    softcap c: scores become c tanh(score / c). sinks fp32 [Hq]: a further logit per head that takes
    part in the softmax and has no value. Hq is a multiple of Hkv; query head h reads KV head
    h // (Hq / Hkv). A sequence with kv_len 0 gives zeros. Behind the others there may be sequences
    without query rows; rows behind the last sequence give zeros.
    """
    if uses_triton(q) and pool.k_scales is None:
        from tokenfleet.kernels.gpu import paged_attention as gpu

        return gpu.paged_attention(
            q, pool, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    library = compiled(q)
    shared = pool.packed() if library else b""
    if library is None or not shared or not _fits(q, sinks):
        return reference(q, pool, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
    out = new_result(q.shape, q.dtype)
    library.tf_paged_attention(
        shared
        + batch.packed()
        + _PACK(
            q.data_ptr(), out.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
            q.stride(0), q.stride(1), q.shape[1], window or 0, DTYPE_CODES[q.dtype],
            scale, softcap or 0.0,
        )
    )  # fmt: skip
    return out


def _fits(q: Tensor, sinks: Tensor | None) -> bool:
    """The compiled form takes heads of whole vectors of 16."""
    return (
        q.shape[2] % 16 == 0
        and q.stride(2) == 1
        and (sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()))
    )


def reference(
    q: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The specification: gather and attend, all decodes at once, then chunk by chunk."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    decodes = batch.num_decodes
    if decodes:
        out[:decodes] = _attend(
            q[:decodes, None],
            *_keys_and_values(pool, batch.block_tables[:decodes], batch.max_kv_len),
            batch.kv_lens[:decodes],
            scale, window, softcap, sinks,
        )[:, 0]  # fmt: skip
    starts = batch.query_starts[decodes:].tolist() if decodes < batch.num_sequences else []
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        s = decodes + i
        kv_len = int(batch.kv_lens[s])
        out[start:end] = _attend(
            q[None, start:end],
            *_keys_and_values(pool, batch.block_tables[s : s + 1], kv_len),
            batch.kv_lens[s : s + 1],
            scale, window, softcap, sinks,
        )[0]  # fmt: skip
    return out


def _keys_and_values(pool: KVPool, tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return (
        _gather(pool.k, pool.k_scale, pool.k_scales, tables, length),
        _gather(pool.v, pool.v_scale, pool.v_scales, tables, length),
    )


def _gather(
    blocks: Tensor, scale: float, scales: Tensor | None, tables: Tensor, length: int
) -> Tensor:
    """[num_blocks, H, B, D] through [S, M] -> [S, H, length rounded up to blocks, D]."""
    _, heads, block_size, dim = blocks.shape
    used = tables[:, : -(-length // block_size)].long()
    tiles = blocks[used]  # [S, used, H, B, D]
    if scales is not None:
        tiles = tiles.float() * scales[used][..., None]
    elif blocks.dtype == FP8:
        tiles = tiles.float() * scale
    return tiles.transpose(1, 2).reshape(tables.shape[0], heads, used.shape[1] * block_size, dim)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [S, Q, Hq, D], the last Q tokens, over k, v [S, Hkv, L, D] -> [S, Q, Hq, D]."""
    S, Q, Hq, D = q.shape
    Hkv, L = k.shape[1], k.shape[2]
    column = torch.arange(L, device=q.device)
    row = kv_lens[:, None].long() - Q + torch.arange(Q, device=q.device)  # [S, Q] query positions
    visible = column <= row[..., None]  # [S, Q, L]
    if window is not None:
        visible &= column > row[..., None] - window
    stored = column < kv_lens[:, None]  # [S, L]
    k = k.float().masked_fill(~stored[:, None, :, None], 0.0)
    v = v.float().masked_fill(~stored[:, None, :, None], 0.0)

    grouped = q.float().view(S, Q, Hkv, Hq // Hkv, D).permute(0, 2, 3, 1, 4)  # [S, Hkv, G, Q, D]
    scores = grouped @ k[:, :, None].transpose(-1, -2) * scale  # [S, Hkv, G, Q, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, Hkv, Hq // Hkv, 1, 1).expand(S, -1, -1, Q, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :L]
    weights = weights.masked_fill(
        ~visible[:, None, None], 0.0
    )  # a row that sees nothing gives zeros
    return (weights @ v[:, :, None]).permute(0, 3, 1, 2, 4).reshape(S, Q, Hq, D).to(q.dtype)
