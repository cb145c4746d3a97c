"""A checkpoint's config.json, brought to one spelling.

What comes out is what transformers' config classes would hold: the same defaults, the same meaning
of older spellings. The classes themselves are not imported (that costs seconds at every start); a
test compares with them instead.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from tokenfleet.engine.errors import ConfigError, UnsupportedModel
from tokenfleet.engine.model.defaults import DEFAULTS, REQUIRED
from tokenfleet.engine.model.field_kinds import ROPE_KINDS, check_kinds
from tokenfleet.engine.model.rope import longest_context

LAYER_TYPES = ("full_attention", "sliding_attention")


def resolve(raw: Mapping[str, Any]) -> SimpleNamespace:
    """config.json's values over its family's defaults, as attributes. Raises CheckpointError."""
    values = {**DEFAULTS[raw["model_type"]], **raw}
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    check_kinds({**dict.fromkeys(REQUIRED), **values})
    return SimpleNamespace(**values)


def flat_rope(raw: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The rope parameters that all layers share. theta: of a config that gives none."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    nested = [key for key in given if key in LAYER_TYPES]
    if nested:
        raise UnsupportedModel(f"rope_parameters by layer type ({nested}) for this model type")
    parameters = {"rope_theta": raw.get("rope_theta") or theta, **given}
    if raw.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    return _standard(parameters, raw)


def nested_rope(
    raw: Mapping[str, Any], full_theta: float, sliding_theta: float
) -> dict[str, dict[str, Any]]:
    """The rope parameters of each layer type; rope_scaling and rope_theta mean the full ones."""
    given = raw.get("rope_parameters") or {}
    strange = [
        key for key, own in given.items() if key not in LAYER_TYPES or not isinstance(own, dict)
    ]
    if strange:
        raise UnsupportedModel(f"rope_parameters must be nested by layer type, but has {strange}")
    full = {
        "rope_theta": raw.get("rope_theta") or full_theta,
        **(given.get("full_attention") or {}),
        **(raw.get("rope_scaling") or {}),
    }
    sliding = {
        "rope_theta": raw.get("rope_local_base_freq") or sliding_theta,
        **(given.get("sliding_attention") or {}),
    }
    return {
        "full_attention": _standard(full, raw),
        "sliding_attention": _standard(sliding, raw),
    }


def _standard(parameters: dict[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`type` as rope_type, and the original length where a rule needs one."""
    check_kinds(parameters, ROPE_KINDS, "config.json: rope parameters")
    parameters.setdefault("rope_type", parameters.get("type") or "default")
    if parameters["rope_type"] in ("llama3", "yarn", "longrope", "su"):
        original = raw.get("original_max_position_embeddings")
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        parameters.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    return parameters


def model_length(ropes: list[Mapping[str, Any]], limit: int, wanted: int | None) -> int:
    """max_model_len: `wanted`, at most what the rope rules allow, or max_position_embeddings."""
    if wanted is None:
        return limit
    longest = max(longest_context(parameters, limit) for parameters in ropes)
    if not 1 <= wanted <= longest:
        raise ConfigError(
            f"max_model_len must be between 1 and {longest} for this model, got {wanted}"
        )
    return wanted


def dtype_name(raw: Mapping[str, Any]) -> str:
    """The checkpoint's own dtype; float32 when it does not say."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(f"dtype {name!r} is not supported; use float32, float16 or bfloat16")
    return name
