"""The weights of one decoder layer, as every way through the layers reads them.

Frozen: what a layer does is decided when it is loaded, never by a step.
"""

from dataclasses import dataclass

from torch import Tensor

from tokenfleet.engine.model.mlp import DenseMlp, GroupedMoeMlp, MoeMlp
from tokenfleet.kernels.linear import PackedWeight


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer: weights, and what distinguishes it from its neighbours."""

    qkv: PackedWeight  # [(Hq + 2 Hkv) D, H]
    o: PackedWeight  # [H, Hq D]
    q_norm: Tensor | None  # [D], or [Hq D] when the norm runs over the whole projection
    k_norm: Tensor | None  # [D], or [Hkv D]
    cos_sin: Tensor  # float32 [max_model_len, rotary_dim]; layers of one rope share it
    window: int | None
    kv_scales: tuple[float, float] = (1.0, 1.0)  # of keys and of values, for a cache in FP8


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. A norm that is None does not exist (spec.TensorNames)."""

    attention: Attention
    mlp: DenseMlp | MoeMlp | GroupedMoeMlp
    attn_in: Tensor | None
    attn_out: Tensor | None
    mlp_in: Tensor | None
    mlp_out: Tensor | None
