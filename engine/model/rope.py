"""Rotary frequencies by each scaling rule, and the table of cosines and sines.

A rule is applied once, when the spec is read, in float32 and in the order of operations of
transformers' modeling_rope_utils, so that angles agree to the last bit at any position. The two
rules that depend on a length (dynamic, longrope) take the engine's max_model_len: one set of
frequencies per engine, or cached keys would belong to another rotation than new queries.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenfleet.engine.errors import UnsupportedModel
from tokenfleet.engine.model.spec import RopeSpec


@dataclass(frozen=True, slots=True)
class RopeContext:
    """What a rule may need besides its own parameters."""

    rotary_dim: int
    max_position: int  # max_position_embeddings of the config
    max_model_len: int


_Result = tuple[Tensor, float]  # inv_freq float32 [rotary_dim / 2], attention factor
_Rule = Callable[[Mapping[str, Any], RopeContext], _Result]


def read_rope(
    parameters: Mapping[str, Any],
    *,
    head_dim: int,
    partial: bool,
    max_position: int,
    max_model_len: int,
) -> RopeSpec:
    """The RopeSpec of one `rope_parameters` dictionary of a transformers config.

    `partial`: whether the family honours partial_rotary_factor. Raises UnsupportedModel, naming the
    rope type or parameter, for anything that is not implemented.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in _RULES:
        raise UnsupportedModel(
            f"rope type {kind!r} is not supported; these are: {', '.join(sorted(_RULES))}"
        )
    rule, known = _RULES[kind]
    _refuse_unknown(kind, parameters, known | _ALWAYS)
    share = parameters.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise UnsupportedModel(
            f"partial_rotary_factor = {share} is not supported for this model type, only 1.0"
        )
    context = RopeContext(int(head_dim * share), max_position, max_model_len)
    try:
        inv_freq, factor = rule(parameters, context)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnsupportedModel(f"rope type {kind!r}: unusable parameters ({error!r})") from error
    if not (inv_freq.isfinite().all() and math.isfinite(factor)):
        raise UnsupportedModel(f"rope type {kind!r}: its parameters give no finite frequencies")
    if 2 * len(inv_freq) > head_dim:
        raise UnsupportedModel(f"rope rotates {2 * len(inv_freq)} of {head_dim} dimensions")
    return RopeSpec(kind, tuple(inv_freq.tolist()), factor)


def cos_sin_table(rope: RopeSpec | None, length: int, device: torch.device) -> Tensor:
    """float32 [length, rotary_dim]: row p holds the cosines, then the sines, of position p.

    None (a layer without positions) gives the rotation by zero of two dimensions: the identity,
    to the bit, so that no kernel needs a case for it.
    """
    inv_freq = torch.tensor(rope.inv_freq if rope else (0.0,), dtype=torch.float32)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq
    factor = rope.attention_factor if rope else 1.0
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * factor).to(device)


def longest_context(parameters: Mapping[str, Any], max_position: int) -> int:
    """The most positions that a model may be run with, by its own scaling rule.

    linear and dynamic stretch max_position_embeddings by their factor, yarn the original length;
    for the others max_position_embeddings is the stretched length already.
    """
    factor = float(parameters.get("factor") or 1.0)
    kind = parameters.get("rope_type", "default")
    if kind in ("linear", "dynamic"):
        return int(max_position * factor)
    if kind == "yarn":
        original = parameters.get("original_max_position_embeddings") or max_position
        return max(max_position, int(original * factor))
    return max_position


def _refuse_unknown(kind: str, parameters: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in parameters.items():
        if name not in known and value not in (None, False):
            raise UnsupportedModel(f"rope type {kind!r}: parameter {name} = {value!r} is not known")


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _default(p: Mapping[str, Any], c: RopeContext) -> _Result:
    return _plain(p["rope_theta"], c.rotary_dim), 1.0


def _linear(p: Mapping[str, Any], c: RopeContext) -> _Result:
    return _plain(p["rope_theta"], c.rotary_dim) / p["factor"], 1.0


def _dynamic(p: Mapping[str, Any], c: RopeContext) -> _Result:
    """NTK scaling for the longest sequence that this engine will run."""
    factor, dim = p["factor"], c.rotary_dim
    length = max(c.max_model_len, c.max_position)
    stretch = (factor * length / c.max_position) - (factor - 1)
    return _plain(p["rope_theta"] * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(p: Mapping[str, Any], c: RopeContext) -> _Result:
    inv_freq = _plain(p["rope_theta"], c.rotary_dim)
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(between, smoothed, scaled), 1.0


def _yarn(p: Mapping[str, Any], c: RopeContext) -> _Result:
    dim, theta = c.rotary_dim, p["rope_theta"]
    original = p["original_max_position_embeddings"]
    factor = p["factor"] if p["factor"] is not None else c.max_position / original

    def correction(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = correction(p.get("beta_fast") or 32), correction(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    extrapolated = 1 - ramp
    inv_freq = 1.0 / (factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated
    return inv_freq, _yarn_attention_factor(p, factor)


def _yarn_attention_factor(p: Mapping[str, Any], factor: float) -> float:
    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return scale(p["mscale"]) / scale(p["mscale_all_dim"])
    return scale(1.0)


def _longrope(p: Mapping[str, Any], c: RopeContext) -> _Result:
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or c.max_position / original
    attention = p.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    name = "long_factor" if c.max_model_len > original else "short_factor"
    stretch = torch.tensor(p[name], dtype=torch.float32)
    if len(stretch) != c.rotary_dim // 2:
        raise ValueError(f"{name} has {len(stretch)} entries for {c.rotary_dim // 2} angles")
    exponent = torch.arange(0, c.rotary_dim, 2, dtype=torch.float32) / c.rotary_dim
    return 1.0 / (stretch * p["rope_theta"] ** exponent), float(attention)


_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ORIGINAL = "original_max_position_embeddings"
_RULES: dict[str, tuple[_Rule, frozenset[str]]] = {
    "default": (_default, frozenset()),
    "linear": (_linear, frozenset({"factor"})),
    "dynamic": (_dynamic, frozenset({"factor"})),
    "llama3": (
        _llama3,
        frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    ),
    "yarn": (
        _yarn,
        frozenset(
            {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "truncate", _ORIGINAL}
        ),
    ),
    "longrope": (
        _longrope,
        frozenset({"factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL}),
    ),
}  # fmt: skip
