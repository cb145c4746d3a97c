"""The layers of a decode step of one sequence, in few launches.

The arithmetic is that of the decoder's general way through the layers, with norms, gates and
residual sums inside the products and all of attention between two products in one pass: six
launches a layer in place of ten. A model that has anything else goes the general way, as does every
step that runs on no GPU.
"""

from collections.abc import Sequence

from torch import Tensor

from tokenfleet.engine.model.layer import Attention, Layer
from tokenfleet.engine.model.mlp import DenseMlp
from tokenfleet.engine.model.spec import ModelSpec
from tokenfleet.kernels import row, row_attention
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.rope_kv import HeadNorms
from tokenfleet.kernels.row import RowNorm, row_linear


class Switch:
    """Whether this way is taken at all; benchmarks compare both."""

    on = True


def takes(spec: ModelSpec, layers: Sequence[Layer], batch: AttentionBatch) -> bool:
    """Whether a step goes this way."""
    if not (Switch.on and row_attention.takes(batch)):
        return False
    plain = spec.residual_scale == 1.0 and spec.qk_norm != "projection"
    return plain and all(_layer_fits(layer) for layer in layers)


def layers(
    spec: ModelSpec,
    layers: Sequence[Layer],
    residual: Tensor,
    batch: AttentionBatch,
    pools: Sequence[KVPool],
) -> Tensor:
    """The residual stream [1, H] behind the last layer; keys and values are written."""
    for layer, pool in zip(layers, pools, strict=True):
        a, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, DenseMlp)
        assert layer.attn_in is not None
        assert layer.mlp_in is not None
        qkv = row_linear(residual, a.qkv, norm=_norm(spec, layer.attn_in))
        mixed = _attend(spec, a, qkv, batch, pool)
        residual = row_linear(mixed.view(1, -1), a.o, add=residual)
        wide = row_linear(residual, mlp.gate_up, norm=_norm(spec, layer.mlp_in), gate=mlp.gate)
        residual = row_linear(wide, mlp.down, add=residual)
    return residual


def _layer_fits(layer: Layer) -> bool:
    if not isinstance(layer.mlp, DenseMlp) or layer.mlp.gate not in row.GATES:
        return False
    if layer.attn_in is None or layer.mlp_in is None or layer.attn_out is not None:
        return False
    weights = (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
    return layer.mlp_out is None and all(map(row.takes, weights))


def _norm(spec: ModelSpec, weight: Tensor) -> RowNorm:
    return RowNorm(weight, spec.norm_eps, spec.norm_offset)


def _attend(
    spec: ModelSpec, a: Attention, qkv: Tensor, batch: AttentionBatch, pool: KVPool
) -> Tensor:
    norms: HeadNorms | None = None
    if a.q_norm is not None and a.k_norm is not None:
        norms = HeadNorms(a.q_norm, a.k_norm, spec.norm_eps, spec.norm_offset)
    return row_attention.row_attention(
        qkv, a.cos_sin, pool, batch, heads=spec.num_q_heads, scale=spec.attention_scale,
        window=a.window, softcap=spec.attention_softcap, norms=norms,
    )  # fmt: skip
