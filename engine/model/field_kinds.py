"""What may stand in each field of config.json that a reader looks at.

A value of another kind is refused by the field's name, before any of it is computed with; whether
the values fit each other is the readers' to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenfleet.engine.errors import CheckpointError
from tokenfleet.engine.model.defaults import REQUIRED


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that make sense, and how to say so."""

    holds: Callable[[Any], bool]
    name: str


def _whole(low: int, high: int = 2**31 - 1) -> Kind:
    def holds(value: Any) -> bool:
        return type(value) is int and low <= value <= high

    name = "a positive integer" if low == 1 else f"an integer of at least {low}"
    return Kind(holds, f"{name}, at most {high}")


def _number(*, above: float = -math.inf, most: float = 1e30) -> Kind:
    """Finite, as float32 too."""

    def holds(value: Any) -> bool:
        return type(value) in (int, float) and above < value <= most

    low = "" if above == -math.inf else f" above {above:g}"
    return Kind(holds, f"a finite number{low}" + ("" if most == 1e30 else f", at most {most:g}"))


def _list_of(part: Kind) -> Kind:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and all(part.holds(one) for one in value)

    return Kind(holds, f"a list, each of it {part.name}")


_TEXT = Kind(lambda value: isinstance(value, str), "a text")
_SWITCH = Kind(lambda value: type(value) is bool, "true or false")
_OBJECT = Kind(lambda value: isinstance(value, dict), "an object")
_SIZE = _whole(1)
_POSITIVE = _number(above=0.0)

KINDS: dict[str, Kind] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _whole(1, 10_000),
    "num_attention_heads": _SIZE,
    "max_position_embeddings": _SIZE,
    "num_key_value_heads": _SIZE,
    "head_dim": _whole(1, 65_536),
    "hidden_act": _TEXT,
    "hidden_activation": _TEXT,
    "rms_norm_eps": _number(above=-1e-30, most=1.0),
    "tie_word_embeddings": _SWITCH,
    "attention_bias": _SWITCH,
    "mlp_bias": _SWITCH,
    "use_sliding_window": _SWITCH,
    "sliding_window": _whole(0),
    "max_window_layers": _whole(0),
    "layer_types": _list_of(_TEXT),
    "query_pre_attn_scalar": _POSITIVE,
    "num_experts": _whole(0, 65_536),
    "num_local_experts": _whole(0, 65_536),
    "num_experts_per_tok": _SIZE,
    "moe_intermediate_size": _SIZE,
    "norm_topk_prob": _SWITCH,
    "decoder_sparse_step": _SIZE,
    "mlp_only_layers": _list_of(_whole(0)),
    "no_rope_layers": _list_of(_whole(0, 1)),
    "no_rope_layer_interval": _SIZE,
    "final_logit_softcapping": _POSITIVE,
    "attn_logit_softcapping": _POSITIVE,
    "sliding_window_pattern": _SIZE,
    "rope_local_base_freq": _POSITIVE,
    "original_max_position_embeddings": _SIZE,
    "embedding_multiplier": _number(),
    "residual_multiplier": _number(),
    "attention_multiplier": _number(),
    "logits_scaling": _POSITIVE,
    "model_type": _TEXT,
    "architectures": _list_of(_TEXT),
    "rope_theta": _POSITIVE,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "partial_rotary_factor": _number(above=0.0, most=1.0),
}
"""By field; None stands for a field that is absent, and is allowed unless NEEDED names it."""
NEEDED = frozenset(
    {
        *REQUIRED,
        "num_key_value_heads",
        "rms_norm_eps",
        "hidden_act",
        "hidden_activation",
        "query_pre_attn_scalar",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "decoder_sparse_step",
        "max_window_layers",
        "sliding_window_pattern",
        "no_rope_layer_interval",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    }
)

ROPE_KINDS: dict[str, Kind] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": KINDS["partial_rotary_factor"],
    "factor": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "original_max_position_embeddings": _SIZE,
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "mscale": _number(),
    "mscale_all_dim": _number(),
    "truncate": _SWITCH,
    "short_factor": _list_of(_POSITIVE),
    "long_factor": _list_of(_POSITIVE),
}
"""The same of rope parameters; those that stand in none of the rules are refused there."""


def check_kinds(
    fields: Mapping[str, Any], kinds: Mapping[str, Kind] = KINDS, where: str = "config.json"
) -> None:
    """Refuse the first field whose value is of another kind.

    Raises:
        CheckpointError: naming field and value.
    """
    for name, kind in kinds.items():
        value = fields.get(name)
        absent = value is None and not (name in NEEDED and name in fields)
        if not absent and not kind.holds(value):
            raise CheckpointError(f"{where}: {name} must be {kind.name}, got {value!r:.100}")
