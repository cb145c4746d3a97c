"""Norm and rotation of the heads, the write of key and value, and attention, for one token at once.

The same as rope_and_write_kv and paged_attention one after the other, which is the reference. On
CUDA it is one launch, and one more where the keys are split among several programs.
"""

from torch import Tensor

from tokenfleet.kernels.backend import uses_triton
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool, paged_attention
from tokenfleet.kernels.rope_kv import HeadNorms, rope_and_write_kv


def row_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """qkv [1, (Hq + 2 Hkv) D] -> [1, Hq, D]; the batch is one sequence with one token.

    heads: Hq. Rotation by halves. The other arguments as in rope_kv.py and paged_attention.py.
    """
    if uses_triton(qkv):
        from tokenfleet.kernels.gpu import row_attention as gpu

        return gpu.row_attention(
            qkv, cos_sin, pool, batch, heads=heads, scale=scale, window=window, softcap=softcap,
            norms=norms,
        )  # fmt: skip
    return reference(
        qkv, cos_sin, pool, batch, heads=heads, scale=scale, window=window, softcap=softcap,
        norms=norms,
    )  # fmt: skip


def reference(
    qkv: Tensor,
    cos_sin: Tensor,
    pool: KVPool,
    batch: AttentionBatch,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """The specification: one operation after the other."""
    kv_heads, dim = pool.k.shape[1], pool.k.shape[3]
    q, k, v = qkv.view(1, -1, dim).split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    q = rope_and_write_kv(q, k, v, cos_sin, pool, batch, norms=norms)
    return paged_attention(q, pool, batch, scale=scale, window=window, softcap=softcap)


def takes(batch: AttentionBatch) -> bool:
    """Whether this step is one sequence with one token."""
    one = batch.num_decodes == batch.num_sequences == batch.max_query_len == 1
    return one and batch.positions.shape[0] == 1
