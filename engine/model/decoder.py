"""The one decoder: embeds a step's tokens, runs the layers over the paged cache, gives logits.

It holds weights and no state of any sequence: what a token sees is decided by the AttentionBatch
and lies in the pools, so the same call serves chunks of prompts and decodes together.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import overload

import torch
from torch import Tensor

from tokenfleet.engine.model import one_row
from tokenfleet.engine.model.layer import Attention, Layer
from tokenfleet.engine.model.mlp import DenseMlp
from tokenfleet.engine.model.spec import ModelSpec
from tokenfleet.kernels.fp8 import FP8, Fp8Rows, Fp8Scales
from tokenfleet.kernels.gated import gated_linear
from tokenfleet.kernels.linear import Int8Rows, PackedWeight, Rounding, linear
from tokenfleet.kernels.norm import (
    add_rms_norm,
    add_rms_norm_fp8,
    add_rms_norm_int8,
    rms_norm,
    rms_norm_fp8,
)
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool, paged_attention
from tokenfleet.kernels.rope_kv import HeadNorms, rope_and_write_kv
from tokenfleet.kernels.workspace import Workspace

_SCALE_BYTES = 4
"""Of each row of keys or values that is cached in int8."""


class Decoder:
    """A loaded model. Made by loader.load_decoder; every weight lies on `device` in `dtype`."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Tensor,
        layers: Sequence[Layer],
        final_norm: Tensor,
        lm_head: PackedWeight,
        kv_dtype: torch.dtype | None = None,
        sample: Sequence[int] = (),
    ) -> None:
        self.spec = spec
        self.embedding = embedding  # [vocab_size, H]
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.dtype = embedding.dtype
        self.kv_dtype = kv_dtype or self.dtype  # of cached keys and values; FP8: over kv_scales
        self.device = embedding.device
        self.sample = tuple(sample)  # what layers in int8 are smoothed by; empty: they are not
        # rounded to the weights' dtype, as the models were trained
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(self.dtype).item()

    def forward(self, token_ids: Tensor, batch: AttentionBatch, pools: Sequence[KVPool]) -> Tensor:
        """token_ids int64 [T] -> final hidden states [T, H], normed, in the model's dtype.

        Writes the tokens' keys and values into `pools` (one a layer) at batch.slots.
        """
        return self.transform(self.embed(token_ids), batch, pools)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [T] -> [T, H], the input of the first layer."""
        embedded = torch.nn.functional.embedding(token_ids, self.embedding)
        if self._embedding_scale != 1.0:
            embedded *= self._embedding_scale
        return embedded

    def transform(
        self,
        embedded: Tensor,
        batch: AttentionBatch,
        pools: Sequence[KVPool],
        workspace: Workspace | None = None,
    ) -> Tensor:
        """`forward` behind `embed`.

        workspace: where the layers put what they hand on (CPU); the result never lies in it.
        """
        with nullcontext() if workspace is None else workspace.open():
            added, residual = self._layers(embedded, batch, pools, workspace)
        return self._enter(added, residual, self.final_norm)[0]

    def _layers(
        self,
        residual: Tensor,
        batch: AttentionBatch,
        pools: Sequence[KVPool],
        workspace: Workspace | None,
    ) -> tuple[Tensor | None, Tensor]:
        """(what the last sub-block gave, not yet in the residual stream; the residual stream)."""
        if one_row.takes(self.spec, self.layers, batch):
            return None, one_row.layers(self.spec, self.layers, residual, batch, pools)
        added: Tensor | None = None
        for layer, pool in zip(self.layers, pools, strict=True):
            if workspace is not None:
                workspace.next_layer()
            into = layer.attention.qkv.rounding
            x, residual = self._enter(added, residual, layer.attn_in, into)
            out = self._leave(self._attend(x, layer.attention, batch, pool), layer.attn_out)
            x, residual = self._enter(out, residual, layer.mlp_in, layer.mlp.rounding)
            added = self._leave(layer.mlp(x), layer.mlp_out)
        return added, residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward`'s result [R, H] -> float32 [R, vocab_size]."""
        spec = self.spec
        logits = linear(hidden, self.lm_head).float()
        if spec.logit_divisor != 1.0:
            logits = logits / spec.logit_divisor
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    def make_pools(self, num_blocks: int, block_size: int) -> list[KVPool]:
        """One pool a layer with `num_blocks` blocks each, the null block among them.

        Not cleared: attention reads no position that was not written, and on a CPU memory that no
        block has used yet is then never touched.
        """
        return self.make_pools_for(self.layers, num_blocks, block_size)

    def make_pools_for(
        self, layers: Sequence[Layer], num_blocks: int, block_size: int
    ) -> list[KVPool]:
        """The same for layers that need not be the decoder's."""
        shape = (num_blocks, self.spec.num_kv_heads, block_size, self.spec.head_dim)

        def blocks() -> Tensor:
            return torch.empty(shape, dtype=self.kv_dtype, device=self.device)

        def scales() -> Tensor | None:
            in_int8 = self.kv_dtype == torch.int8
            return torch.empty(shape[:3], device=self.device) if in_int8 else None

        fixed = [
            layer.attention.kv_scales if self.kv_dtype == FP8 else (1.0, 1.0) for layer in layers
        ]
        return [KVPool(blocks(), blocks(), *pair, scales(), scales()) for pair in fixed]

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block takes, over all layers."""
        rows = self.spec.num_kv_heads * block_size
        scale = _SCALE_BYTES if self.kv_dtype == torch.int8 else 0
        return 2 * len(self.layers) * rows * (self.spec.head_dim * self.kv_dtype.itemsize + scale)

    def watch(
        self,
        layer: Layer,
        added: Tensor | None,
        residual: Tensor,
        batch: AttentionBatch,
        pool: KVPool,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
        """One dense layer in 16 or 32 bits: what its QKV, gate-up and down projections are given;
        what it adds to the residual stream; the residual stream."""
        mlp = layer.mlp
        assert isinstance(mlp, DenseMlp)
        x, residual = self._enter(added, residual, layer.attn_in)
        out = self._leave(self._attend(x, layer.attention, batch, pool), layer.attn_out)
        y, residual = self._enter(out, residual, layer.mlp_in)
        wide = gated_linear(y, mlp.gate_up, mlp.gate)
        return (x, y, wide), self._leave(linear(wide, mlp.down), layer.mlp_out), residual

    @overload
    def _enter(
        self, added: Tensor | None, residual: Tensor, norm: Tensor | None, into: None = None
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def _enter(
        self, added: Tensor | None, residual: Tensor, norm: Tensor | None, into: Rounding | None
    ) -> tuple[Tensor | Fp8Rows | Int8Rows, Tensor]: ...

    def _enter(
        self,
        added: Tensor | None,
        residual: Tensor,
        norm: Tensor | None,
        into: Rounding | None = None,
    ) -> tuple[Tensor | Fp8Rows | Int8Rows, Tensor]:
        """(input of the next sub-block, residual stream with `added` in it).

        into: how the projection that comes next rounds its inputs; done in the norm's own pass.
        """
        eps, offset = self.spec.norm_eps, self.spec.norm_offset
        if norm is None:
            total = residual if added is None else residual + added
            return total, total
        if added is None:
            if isinstance(into, Fp8Scales):
                return rms_norm_fp8(residual, norm, eps, into, weight_offset=offset), residual
            return rms_norm(residual, norm, eps, weight_offset=offset), residual
        if into == "int8":
            return add_rms_norm_int8(added, residual, norm, eps, weight_offset=offset)
        if into is not None:
            return add_rms_norm_fp8(added, residual, norm, eps, into, weight_offset=offset)
        return add_rms_norm(added, residual, norm, eps, weight_offset=offset)

    def _leave(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """A sub-block's output as it goes into the residual stream."""
        if norm is not None:
            x = rms_norm(x, norm, self.spec.norm_eps, weight_offset=self.spec.norm_offset)
        if self.spec.residual_scale != 1.0:
            x = x * self.spec.residual_scale
        return x

    def _attend(
        self, x: Tensor | Fp8Rows | Int8Rows, a: Attention, batch: AttentionBatch, pool: KVPool
    ) -> Tensor:
        spec = self.spec
        Hq, Hkv, D = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
        heads = linear(x, a.qkv).view(-1, Hq + 2 * Hkv, D)
        q, k, v = heads.split_with_sizes((Hq, Hkv, Hkv), dim=1)
        norms: HeadNorms | None = None
        if a.q_norm is not None and a.k_norm is not None:
            if spec.qk_norm == "projection":
                q, k = self._projection_norm(q, a.q_norm), self._projection_norm(k, a.k_norm)
            else:
                norms = HeadNorms(a.q_norm, a.k_norm, spec.norm_eps, spec.norm_offset)
        q = rope_and_write_kv(q, k, v, a.cos_sin, pool, batch, norms=norms)
        mixed = paged_attention(
            q,
            pool,
            batch,
            scale=spec.attention_scale,
            window=a.window,
            softcap=spec.attention_softcap,
        )
        return linear(mixed.view(-1, Hq * D), a.o)

    def _projection_norm(self, heads: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of [T, heads, D] over all heads at once."""
        eps, offset = self.spec.norm_eps, self.spec.norm_offset
        return rms_norm(heads.flatten(1), weight, eps, weight_offset=offset).view(heads.shape)
