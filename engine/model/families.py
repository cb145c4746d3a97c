"""From a checkpoint's config.json to a ModelSpec: one short reader a `model_type`.

Every field of config.json is known to its family (defaults.py), known to leave a forward pass as it
is (neutral_fields.py), or off; any other is refused by name, so that no model runs with half of its
arithmetic.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenfleet.engine.errors import UnsupportedModel
from tokenfleet.engine.json_files import eos_token_ids, read_json
from tokenfleet.engine.model.config_file import (
    flat_rope,
    model_length,
    nested_rope,
    resolve,
)
from tokenfleet.engine.model.defaults import DEFAULTS, is_known
from tokenfleet.engine.model.field_kinds import KINDS, check_kinds
from tokenfleet.engine.model.neutral_fields import is_neutral
from tokenfleet.engine.model.plain_decoder import Source, activation, by_type, everywhere, plain
from tokenfleet.engine.model.quantization import read_quantization
from tokenfleet.engine.model.spec import ModelSpec, MoESpec, TensorNames


def read_spec(path: Path, *, max_model_len: int | None = None) -> ModelSpec:
    """The spec of the checkpoint in directory `path`.

    max_model_len: longest sequence that will be run; None takes max_position_embeddings. Raises
    CheckpointError (a file is missing or no JSON, a size is missing), UnsupportedModel
    (architecture, rope type or field, by name), ConfigError (max_model_len beyond what the model
    was made for).
    """
    raw = read_json(path / "config.json")
    family = _family(raw)
    _check_fields(raw)
    config = resolve(raw)
    ropes = _ropes(raw, family)
    length = model_length(list(ropes.values()), config.max_position_embeddings, max_model_len)
    spec = family.read(Source(config, raw, ropes, length, family.partial_rotary))
    if spec.num_q_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads = {spec.num_q_heads} is no multiple of"
            f" num_key_value_heads = {spec.num_kv_heads}"
        )
    ending = eos_token_ids(path, config.eos_token_id)
    ending = tuple(token for token in ending if 0 <= token < spec.vocab_size)  # others never come
    return replace(spec, eos_token_ids=ending, fp8=read_quantization(raw))


# ---------------------------------------------------------------- the families


def _llama(s: Source) -> ModelSpec:
    return plain(s, bias=s.config.attention_bias, mlp_bias=bool(s.config.mlp_bias))


def _mistral(s: Source) -> ModelSpec:
    return plain(s, windows=everywhere(s, s.config.sliding_window))


def _qwen2(s: Source) -> ModelSpec:
    return plain(s, qkv_bias=True, windows=_qwen_windows(s))


def _qwen3(s: Source) -> ModelSpec:
    return plain(s, bias=s.config.attention_bias, qk_norm="head", windows=_qwen_windows(s))


def _qwen_windows(s: Source) -> list[int | None]:
    """The layers from max_window_layers on slide, when sliding is switched on."""
    c = s.config
    window = c.sliding_window if c.use_sliding_window else None
    return by_type(s, window, lambda i: window is not None and i >= c.max_window_layers)


def _qwen3_moe(s: Source) -> ModelSpec:
    c = s.config
    experts = c.num_local_experts or c.num_experts or 0  # two spellings of one field
    moe = MoESpec(experts, c.num_experts_per_tok, c.moe_intermediate_size, bool(c.norm_topk_prob))
    if experts:
        _check_routing(moe)
    dense = c.mlp_only_layers or []
    sparse = [
        i not in dense and experts > 0 and (i + 1) % c.decoder_sparse_step == 0
        for i in range(c.num_hidden_layers)
    ]
    return plain(
        s,
        bias=c.attention_bias,
        qk_norm="head",
        windows=everywhere(s, c.sliding_window if c.use_sliding_window else None),
        experts=[moe if here else None for here in sparse],
    )


def _mixtral(s: Source) -> ModelSpec:
    c = s.config
    experts = c.num_experts or c.num_local_experts
    moe = MoESpec(experts or 0, c.num_experts_per_tok, c.intermediate_size, True)
    _check_routing(moe)
    names = TensorNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    )
    windows = everywhere(s, c.sliding_window)
    return plain(s, names=names, windows=windows, experts=[moe] * c.num_hidden_layers)


def _check_routing(moe: MoESpec) -> None:
    if moe.top_k > moe.num_experts:
        raise UnsupportedModel(
            f"num_experts_per_tok = {moe.top_k} is more than the {moe.num_experts} experts there"
            " are"
        )


def _smollm3(s: Source) -> ModelSpec:
    c = s.config
    n, interval = c.num_hidden_layers, c.no_rope_layer_interval
    turns = c.no_rope_layers or [int((i + 1) % interval != 0) for i in range(n)]
    if len(turns) < n:
        raise UnsupportedModel(f"no_rope_layers has {len(turns)} entries for {n} layers")
    window = c.sliding_window if c.use_sliding_window else None
    return plain(
        s,
        bias=c.attention_bias,
        mlp_bias=bool(c.mlp_bias),
        windows=by_type(s, window, lambda i: window is not None and not turns[i]),
        rope_of_layer=["all" if turn else None for turn in turns[:n]],
    )


def _gemma2(s: Source) -> ModelSpec:
    return _gemma(
        s,
        windows=by_type(s, s.config.sliding_window, lambda i: i % 2 == 0),
        attention_softcap=s.config.attn_logit_softcapping,
    )


def _gemma3_text(s: Source) -> ModelSpec:
    c = s.config
    if c.attn_logit_softcapping is not None:
        raise UnsupportedModel("gemma3_text: attn_logit_softcapping is not supported, only null")
    windows = by_type(s, c.sliding_window, lambda i: (i + 1) % c.sliding_window_pattern != 0)
    return _gemma(s, qk_norm="head", windows=windows, rope_of_layer=_rope_by_window(windows))


def _gemma(s: Source, **more: Any) -> ModelSpec:
    c = s.config
    return plain(
        s,
        names=TensorNames(
            attn_out="post_attention_layernorm",
            mlp_in="pre_feedforward_layernorm",
            mlp_out="post_feedforward_layernorm",
        ),
        activation=activation(c.hidden_activation),
        norm_offset=1.0,
        embedding_scale=c.hidden_size**0.5,
        attention_scale=c.query_pre_attn_scalar**-0.5,
        logit_softcap=c.final_logit_softcapping,
        bias=c.attention_bias,
        float16_safe=False,
        **more,
    )


def _phi3(s: Source) -> ModelSpec:
    names = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    return plain(s, names=names, windows=everywhere(s, s.config.sliding_window))


def _olmo2(s: Source, **more: Any) -> ModelSpec:
    names = TensorNames(
        attn_in=None,
        attn_out="post_attention_layernorm",
        mlp_in=None,
        mlp_out="post_feedforward_layernorm",
    )
    return plain(s, names=names, bias=s.config.attention_bias, qk_norm="projection", **more)


def _olmo3(s: Source) -> ModelSpec:
    windows = by_type(s, s.config.sliding_window, lambda i: (i + 1) % 4 != 0)
    return _olmo2(s, windows=windows, rope_of_layer=_rope_by_window(windows))


def _rope_by_window(windows: list[int | None]) -> list[str | None]:
    return ["full_attention" if w is None else "sliding_attention" for w in windows]


def _granite(s: Source) -> ModelSpec:
    c = s.config
    return plain(
        s,
        bias=c.attention_bias,
        mlp_bias=bool(c.mlp_bias),
        embedding_scale=float(c.embedding_multiplier),
        residual_scale=float(c.residual_multiplier),
        attention_scale=float(c.attention_multiplier),
        logit_divisor=float(c.logits_scaling),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """How one model_type is read; the fields that it knows stand in defaults.py."""

    read: Callable[[Source], ModelSpec]
    rope_theta: float = 10000.0  # of a config that gives none
    sliding_rope_theta: float | None = None  # set: rope parameters are nested by layer type
    partial_rotary: bool = False  # honours partial_rotary_factor


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "mistral": Family(_mistral),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3),
    "qwen3_moe": Family(_qwen3_moe),
    "mixtral": Family(_mixtral, rope_theta=1000000.0),
    "smollm3": Family(_smollm3, rope_theta=2000000.0),
    "gemma2": Family(_gemma2),
    "gemma3_text": Family(_gemma3_text, rope_theta=1000000.0, sliding_rope_theta=10000.0),
    "phi3": Family(_phi3, partial_rotary=True),
    "olmo2": Family(_olmo2),
    "olmo3": Family(_olmo3, rope_theta=500000.0, sliding_rope_theta=500000.0),
    "granite": Family(_granite),
}


# ------------------------------------------------------------------- refusals


def _family(raw: Mapping[str, Any]) -> Family:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported; these are: {', '.join(sorted(FAMILIES))}"
        )
    check_kinds(raw, {"architectures": KINDS["architectures"]})
    for name in raw.get("architectures") or ():
        if not name.endswith("ForCausalLM"):
            raise UnsupportedModel(f"architecture {name!r} is not supported, only ...ForCausalLM")
    return FAMILIES[model_type]


def _check_fields(raw: Mapping[str, Any]) -> None:
    for name, value in raw.items():
        if name in ("quantization_config", "compression_config"):
            continue  # read_quantization knows or refuses what is in it
        if not is_known(raw["model_type"], name) and not is_neutral(name, value):
            raise UnsupportedModel(
                f"config.json: {name} = {value!r} is not known for model_type"
                f" {raw['model_type']!r}; it may change the model's arithmetic"
            )


def _ropes(raw: Mapping[str, Any], family: Family) -> dict[str, dict[str, Any]]:
    """Rope parameters by layer type, or under "all"."""
    if family.sliding_rope_theta is not None:
        return nested_rope(raw, family.rope_theta, family.sliding_rope_theta)
    parameters = flat_rope({**DEFAULTS[raw["model_type"]], **raw}, family.rope_theta)
    if raw["model_type"] == "phi3" and parameters["rope_type"] in ("su", "yarn"):
        parameters["rope_type"] = "longrope"  # what Phi-3's first configs call it
    return {"all": parameters}
