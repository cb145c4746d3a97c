"""What the family readers share: the ordinary decoder of a config, and its layers' windows.

A reader states only how its family differs from `plain`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tokenfleet.engine.errors import UnsupportedModel
from tokenfleet.engine.model.config_file import LAYER_TYPES, dtype_name
from tokenfleet.engine.model.rope import read_rope
from tokenfleet.engine.model.spec import Activation, LayerSpec, ModelSpec, MoESpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Source:
    """A config as its family's reader sees it."""

    config: SimpleNamespace  # config.json over the family's defaults
    raw: Mapping[str, Any]  # config.json as it stands
    ropes: Mapping[str, Mapping[str, Any]]  # parameters by layer type, or under "all"
    max_model_len: int
    partial_rotary: bool  # whether the family honours partial_rotary_factor

    @property
    def head_dim(self) -> int:
        """As given; where it is absent, hidden size over heads."""
        given = self.config.head_dim
        return int(given or self.config.hidden_size // self.config.num_attention_heads)

    def rope(self, kind: str) -> RopeSpec:
        """Rotary embedding of one layer type, or of "all"; see read_rope."""
        return read_rope(
            self.ropes[kind],
            head_dim=self.head_dim,
            partial=self.partial_rotary,
            max_position=self.config.max_position_embeddings,
            max_model_len=self.max_model_len,
        )


def plain(
    s: Source,
    *,
    bias: bool = False,
    windows: Sequence[int | None] | None = None,
    rope_of_layer: Sequence[str | None] | None = None,
    experts: Sequence[MoESpec | None] | None = None,
    **more: Any,
) -> ModelSpec:
    """The plain decoder of a config; `more` replaces fields of the ModelSpec.

    bias: on all four attention projections. windows, rope_of_layer (a key of s.ropes, or None),
    experts: one entry a layer.
    """
    c = s.config
    n = c.num_hidden_layers
    kinds = list(s.ropes)
    ropes = [kind if kind is None else kinds.index(kind) for kind in rope_of_layer or ["all"] * n]
    layers = tuple(
        LayerSpec("full" if w is None else "sliding", w, r, c.intermediate_size, e)
        for w, r, e in zip(windows or [None] * n, ropes, experts or [None] * n, strict=True)
    )
    fields: dict[str, Any] = {
        "activation": "silu" if "activation" in more else activation(c.hidden_act),
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
        ropes=tuple(s.rope(kind) for kind in kinds),
        max_model_len=s.max_model_len,
        norm_eps=c.rms_norm_eps,
        eos_token_ids=(),
        dtype=dtype_name(s.raw),
        tie_embeddings=bool(c.tie_word_embeddings),
        **fields,
    )


def everywhere(s: Source, window: int | None) -> list[int | None]:
    """The same window for each layer."""
    return [window or None] * s.config.num_hidden_layers


def by_type(s: Source, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
    """A window for each layer that layer_types calls sliding; without layer_types, that `slides`
    says so."""
    n = s.config.num_hidden_layers
    kinds = s.config.layer_types or [LAYER_TYPES[slides(i)] for i in range(n)]
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise UnsupportedModel(
                f"layer_types: {kind!r} is not supported; these are: {', '.join(LAYER_TYPES)}"
            )
    if len(kinds) != n:
        raise UnsupportedModel(f"layer_types has {len(kinds)} entries for {n} layers")
    if "sliding_attention" in kinds and not window:
        raise UnsupportedModel("layer_types names sliding_attention, but sliding_window is not set")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def activation(name: str) -> Activation:
    """The gate function that a config names."""
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
