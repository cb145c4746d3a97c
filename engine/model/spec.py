"""What a decoder computes, as plain data.

A ModelSpec is complete: the decoder and the loader look at nothing else, and no field means
something different for another family. It imports no torch, so the scheduler may read it too.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
AttentionKind = Literal["full", "sliding"]
Fp8Activations = Literal["none", "static", "token", "group"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first 2 * len(inv_freq) dimensions of a head."""

    kind: str  # default | linear | dynamic | llama3 | yarn | longrope: which rule made inv_freq
    inv_freq: tuple[float, ...]  # radians per position; each is exactly a float32
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A router over experts, each a gated MLP of `intermediate_size`."""

    num_experts: int
    top_k: int  # experts that one token visits
    intermediate_size: int
    renormalize: bool  # the top_k probabilities are divided by their sum


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer; what all layers share stands in ModelSpec."""

    attention: AttentionKind
    window: int | None  # sliding: a token sees the last `window` tokens, itself included
    rope: int | None  # index into ModelSpec.ropes; None: no position is encoded
    intermediate_size: int  # of the dense MLP; unused when moe is set
    moe: MoESpec | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a family's checkpoint keeps a layer's tensors, below `model.layers.<i>.`.

    A norm that is None does not exist: `attn_in` and `mlp_in` come before a sub-block, `attn_out`
    and `mlp_out` after it, before the residual sum. `qkv` and `gate_up` name the parts of a fused
    projection from top to bottom, or the one tensor in which they are fused already.
    """

    attn_in: str | None = "input_layernorm"
    attn_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, slots=True)
class Fp8Spec:
    """How a checkpoint keeps its projections in FP8: codes as `<module>.weight`, scales beside."""

    block: tuple[int, int] | None  # outputs x inputs of one scale; None: a tensor's or an output's
    activations: Fp8Activations  # how a projection's inputs are rounded, as in kernels/fp8.py
    ignored: tuple[str, ...] = ()  # modules that stay in 16 or 32 bits; patterns of is_ignored


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer."""

    model_type: str  # as in config.json; for messages, never branched on
    vocab_size: int  # rows of the embedding and of the logits
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ropes: tuple[RopeSpec, ...]
    max_model_len: int  # positions that the rotary tables hold
    norm_eps: float
    eos_token_ids: tuple[int, ...]  # any of them ends a text
    dtype: str  # the checkpoint's own: float32 | float16 | bfloat16
    tie_embeddings: bool
    names: TensorNames = TensorNames()
    activation: Activation = "silu"
    norm_offset: float = 0.0  # Gemma's checkpoints hold weight - 1
    qk_norm: Literal["none", "head", "projection"] = "none"  # over a head / all heads at once
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float = 1.0  # factor on q k^T
    attention_softcap: float | None = None  # c: scores become c tanh(score / c)
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor on what a sub-block adds to the residual stream
    float16_safe: bool = True  # False: activations are known to leave float16's range
    fp8: Fp8Spec | None = None  # set: the checkpoint's projections are in FP8

    @property
    def num_layers(self) -> int:
        """Decoder layers, of any type."""
        return len(self.layers)
