"""From a checkpoint's config.json to a ModelSpec: one short reader a `model_type`.

Defaults come from transformers' config classes. Every field of config.json is either read by the
family's reader, known to leave a forward pass unchanged, or off; any other is refused by name, so
that no model runs with half of its arithmetic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenfleet.engine.errors import UnsupportedModel
from tokenfleet.engine.model.config_file import (
    dtype_name,
    end_tokens,
    model_length,
    read_json,
    transformers_config,
)
from tokenfleet.engine.model.neutral_fields import is_neutral
from tokenfleet.engine.model.rope import read_rope
from tokenfleet.engine.model.spec import (
    Activation,
    LayerSpec,
    ModelSpec,
    MoESpec,
    RopeSpec,
    TensorNames,
)


@dataclass(frozen=True, slots=True)
class Source:
    """A config as its family's reader sees it."""

    config: Any  # transformers' config object: defaults filled in
    raw: Mapping[str, Any]  # config.json as it stands
    max_model_len: int
    partial_rotary: bool  # whether the family honours partial_rotary_factor

    @property
    def head_dim(self) -> int:
        given = getattr(self.config, "head_dim", None)
        return int(given or self.config.hidden_size // self.config.num_attention_heads)

    def rope(self, parameters: Mapping[str, Any]) -> RopeSpec:
        return read_rope(
            parameters,
            head_dim=self.head_dim,
            partial=self.partial_rotary,
            max_position=self.config.max_position_embeddings,
            max_model_len=self.max_model_len,
        )


def read_spec(path: Path, *, max_model_len: int | None = None) -> ModelSpec:
    """The spec of the checkpoint in directory `path`.

    max_model_len: longest sequence that will be run; None takes max_position_embeddings. Raises
    CheckpointError (a file is missing or no JSON), UnsupportedModel (architecture, rope type or
    field, by name), ConfigError (max_model_len beyond what the model was made for).
    """
    raw = read_json(path / "config.json")
    family = _family(raw)
    _check_fields(raw, family)
    config = transformers_config(path)
    length = model_length(config, max_model_len)
    spec = family.read(Source(config, raw, length, family.partial_rotary))
    return _checked(spec, end_tokens(path, config))


# ---------------------------------------------------------------- the families


def _llama(s: Source) -> ModelSpec:
    return _decoder(s, bias=s.config.attention_bias, mlp_bias=s.config.mlp_bias)


def _mistral(s: Source) -> ModelSpec:
    return _decoder(s, windows=_everywhere(s, s.config.sliding_window))


def _qwen2(s: Source) -> ModelSpec:
    return _decoder(s, qkv_bias=True, windows=_by_type(s))


def _qwen3(s: Source) -> ModelSpec:
    return _decoder(s, bias=s.config.attention_bias, qk_norm="head", windows=_by_type(s))


def _qwen3_moe(s: Source) -> ModelSpec:
    c = s.config
    moe = MoESpec(
        c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, bool(c.norm_topk_prob)
    )
    sparse = [
        i not in c.mlp_only_layers and c.num_experts > 0 and (i + 1) % c.decoder_sparse_step == 0
        for i in range(c.num_hidden_layers)
    ]
    return _decoder(
        s,
        bias=c.attention_bias,
        qk_norm="head",
        windows=_everywhere(s, c.sliding_window),
        experts=[moe if here else None for here in sparse],
    )


def _mixtral(s: Source) -> ModelSpec:
    c = s.config
    moe = MoESpec(c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, True)
    names = TensorNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    )
    return _decoder(
        s,
        names=names,
        windows=_everywhere(s, c.sliding_window),
        experts=[moe] * c.num_hidden_layers,
    )


def _smollm3(s: Source) -> ModelSpec:
    c = s.config
    return _decoder(
        s,
        bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        windows=_by_type(s),
        rope_of_layer=[0 if used else None for used in c.no_rope_layers[: c.num_hidden_layers]],
    )


def _gemma2(s: Source) -> ModelSpec:
    return _gemma(
        s,
        attention_softcap=s.config.attn_logit_softcapping,
        ropes=(s.rope(s.config.rope_parameters),),
    )


def _gemma3_text(s: Source) -> ModelSpec:
    if s.config.attn_logit_softcapping is not None:
        raise UnsupportedModel("gemma3_text: attn_logit_softcapping is not supported, only null")
    ropes, rope_of_layer = _ropes_by_type(s)
    return _gemma(s, qk_norm="head", ropes=ropes, rope_of_layer=rope_of_layer)


def _gemma(s: Source, **more: Any) -> ModelSpec:
    c = s.config
    return _decoder(
        s,
        names=TensorNames(
            attn_out="post_attention_layernorm",
            mlp_in="pre_feedforward_layernorm",
            mlp_out="post_feedforward_layernorm",
        ),
        activation=_activation(c.hidden_activation),
        norm_offset=1.0,
        embedding_scale=c.hidden_size**0.5,
        attention_scale=c.query_pre_attn_scalar**-0.5,
        logit_softcap=c.final_logit_softcapping,
        bias=c.attention_bias,
        windows=_by_type(s),
        float16_safe=False,
        **more,
    )


def _phi3(s: Source) -> ModelSpec:
    names = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return _decoder(s, names=names, windows=_everywhere(s, s.config.sliding_window))


def _olmo2(s: Source, **more: Any) -> ModelSpec:
    names = TensorNames(
        attn_in=None,
        attn_out="post_attention_layernorm",
        mlp_in=None,
        mlp_out="post_feedforward_layernorm",
    )
    return _decoder(s, names=names, bias=s.config.attention_bias, qk_norm="projection", **more)


def _olmo3(s: Source) -> ModelSpec:
    ropes, rope_of_layer = _ropes_by_type(s)
    return _olmo2(s, windows=_by_type(s), ropes=ropes, rope_of_layer=rope_of_layer)


def _granite(s: Source) -> ModelSpec:
    c = s.config
    return _decoder(
        s,
        bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        embedding_scale=float(c.embedding_multiplier),
        residual_scale=float(c.residual_multiplier),
        attention_scale=float(c.attention_multiplier),
        logit_divisor=float(c.logits_scaling),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """A reader and the fields of config.json that it reads beyond the common ones."""

    read: Callable[[Source], ModelSpec]
    fields: frozenset[str]
    partial_rotary: bool = False


_COMMON_FIELDS = """
    model_type architectures dtype torch_dtype vocab_size hidden_size intermediate_size
    num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    max_position_embeddings rms_norm_eps tie_word_embeddings eos_token_id
    rope_theta rope_scaling rope_parameters partial_rotary_factor
"""


def _fields(names: str) -> frozenset[str]:
    return frozenset(f"{_COMMON_FIELDS} {names}".split())


_QWEN = "sliding_window use_sliding_window max_window_layers layer_types"
_MOE = "num_experts num_local_experts num_experts_per_tok"
_GEMMA = (
    "hidden_activation query_pre_attn_scalar sliding_window layer_types attention_bias"
    " final_logit_softcapping attn_logit_softcapping"
)
FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _fields("attention_bias mlp_bias")),
    "mistral": Family(_mistral, _fields("sliding_window")),
    "qwen2": Family(_qwen2, _fields(_QWEN)),
    "qwen3": Family(_qwen3, _fields(_QWEN + " attention_bias")),
    "qwen3_moe": Family(
        _qwen3_moe,
        _fields(
            f"{_MOE} sliding_window use_sliding_window max_window_layers attention_bias"
            " moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"
        ),
    ),
    "mixtral": Family(_mixtral, _fields(f"{_MOE} sliding_window")),
    "smollm3": Family(
        _smollm3,
        _fields(_QWEN + " attention_bias mlp_bias no_rope_layers no_rope_layer_interval"),
    ),
    "gemma2": Family(_gemma2, _fields(_GEMMA)),
    "gemma3_text": Family(
        _gemma3_text, _fields(_GEMMA + " sliding_window_pattern rope_local_base_freq")
    ),
    "phi3": Family(
        _phi3, _fields("sliding_window original_max_position_embeddings"), partial_rotary=True
    ),
    "olmo2": Family(_olmo2, _fields("attention_bias")),
    "olmo3": Family(_olmo3, _fields("attention_bias sliding_window layer_types")),
    "granite": Family(
        _granite,
        _fields(
            "attention_bias mlp_bias embedding_multiplier residual_multiplier"
            " attention_multiplier logits_scaling"
        ),
    ),
}


# ------------------------------------------------------- what they are made of


def _decoder(
    s: Source,
    *,
    bias: bool = False,
    windows: Sequence[int | None] | None = None,
    ropes: tuple[RopeSpec, ...] | None = None,
    rope_of_layer: Sequence[int | None] | None = None,
    experts: Sequence[MoESpec | None] | None = None,
    **more: Any,
) -> ModelSpec:
    """The plain decoder of a config; `more` replaces fields of the ModelSpec.

    bias: on all four attention projections. windows, rope_of_layer, experts: one entry a layer.
    """
    c = s.config
    n = c.num_hidden_layers
    if ropes is None:
        ropes = (s.rope(c.rope_parameters),)
    windows = windows or [None] * n
    experts = experts or [None] * n
    layers = tuple(
        LayerSpec("full" if w is None else "sliding", w, r, c.intermediate_size, e)
        for w, r, e in zip(windows, rope_of_layer or [0] * n, experts, strict=True)
    )
    fields: dict[str, Any] = {
        "activation": "silu" if "activation" in more else _activation(c.hidden_act),
        "qkv_bias": bool(bias),
        "o_bias": bool(bias),
        "attention_scale": s.head_dim**-0.5,
    } | more
    return ModelSpec(
        model_type=s.raw["model_type"],
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        layers=layers,
        num_q_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=s.head_dim,
        ropes=ropes,
        max_model_len=s.max_model_len,
        norm_eps=c.rms_norm_eps,
        eos_token_ids=(),
        dtype=dtype_name(s.raw),
        tie_embeddings=bool(c.tie_word_embeddings),
        **fields,
    )


def _everywhere(s: Source, window: int | None) -> list[int | None]:
    return [window or None] * s.config.num_hidden_layers


def _by_type(s: Source) -> list[int | None]:
    """A window for each layer that layer_types calls sliding."""
    known: dict[str, int | None] = {
        "full_attention": None,
        "sliding_attention": s.config.sliding_window,
    }
    for kind in s.config.layer_types:
        if kind not in known:
            raise UnsupportedModel(
                f"layer_types: {kind!r} is not supported; these are: {', '.join(known)}"
            )
    if "sliding_attention" in s.config.layer_types and not s.config.sliding_window:
        raise UnsupportedModel("layer_types names sliding_attention, but sliding_window is not set")
    return [known[kind] for kind in s.config.layer_types]


def _ropes_by_type(s: Source) -> tuple[tuple[RopeSpec, ...], list[int | None]]:
    """One rope a layer type (`rope_parameters` is nested), and each layer's index into them."""
    types = sorted(set(s.config.layer_types))
    ropes = tuple(s.rope(s.config.rope_parameters[kind]) for kind in types)
    return ropes, [types.index(kind) for kind in s.config.layer_types]


def _activation(name: str) -> Activation:
    known: dict[str, Activation] = {
        "silu": "silu",
        "swish": "silu",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
    if name not in known:
        raise UnsupportedModel(
            f"activation {name!r} is not supported; these are: {', '.join(known)}"
        )
    return known[name]


# ------------------------------------------------------------------ refusals


def _family(raw: Mapping[str, Any]) -> Family:
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported; these are: {', '.join(sorted(FAMILIES))}"
        )
    for name in raw.get("architectures") or ():
        if not name.endswith("ForCausalLM"):
            raise UnsupportedModel(f"architecture {name!r} is not supported, only ...ForCausalLM")
    return FAMILIES[model_type]


def _check_fields(raw: Mapping[str, Any], family: Family) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise UnsupportedModel(
            f"quantization_config: checkpoints quantised by {method!r} are not supported;"
            " use the checkpoint in bfloat16, float16 or float32"
        )
    for name, value in raw.items():
        if name not in family.fields and not is_neutral(name, value):
            raise UnsupportedModel(
                f"config.json: {name} = {value!r} is not known for model_type"
                f" {raw['model_type']!r}; it may change the model's arithmetic"
            )


def _checked(spec: ModelSpec, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    if spec.num_q_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads = {spec.num_q_heads} is no multiple of"
            f" num_key_value_heads = {spec.num_kv_heads}"
        )
    return replace(spec, eos_token_ids=eos_token_ids)
