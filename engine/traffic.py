"""How many bytes a step has to read at least: the engine's work in a physical unit.

Divided by the time of the forward pass it is the bandwidth reached, to be held against what the
memory can do. It is counted from shapes and lengths, never measured: caches may serve part of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.scheduling.plan import StepPlan
from tokenfleet.kernels.linear import PackedWeight
from tokenfleet.kernels.moe import ExpertWeights


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """The experts of one layer, of which a step reads those that its tokens chose."""

    num_bytes: int
    num_experts: int
    top_k: int

    def read(self, num_tokens: int) -> float:
        """Expected bytes when every token chooses evenly."""
        untouched = (1 - self.top_k / self.num_experts) ** num_tokens
        return self.num_bytes * (1 - untouched)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """The KV cache of the layers that see equally far back."""

    per_token: int
    window: int | None

    def read(self, start: int, count: int) -> int:
        """Bytes that `count` tokens from position `start` look at, each block of them once."""
        seen = start + count
        if self.window is not None:
            seen = min(seen, self.window + count - 1)
        return seen * self.per_token

    def read_by(self, plan: StepPlan) -> int:
        """Bytes that all chunks of a step look at."""
        if self.window is not None:
            return sum([self.read(chunk.start, chunk.count) for chunk in plan.work])
        before = sum([chunk.start for chunk in plan.work])
        return (before + plan.num_tokens) * self.per_token


@dataclass(frozen=True, slots=True)
class Traffic:
    """What steps read, by part."""

    weight_bytes: int = 0
    """Read once in every step, whatever the batch is."""
    experts: tuple[ExpertBytes, ...] = ()
    kv: tuple[KVBytes, ...] = ()

    def of(self, plan: StepPlan) -> int:
        """Bytes that the plan's step reads; an empty plan reads none."""
        if not plan:
            return 0
        cached = sum(kv.read_by(plan) for kv in self.kv)
        chosen = sum(experts.read(plan.num_tokens) for experts in self.experts)
        return self.weight_bytes + int(chosen) + cached


NO_TRAFFIC = Traffic()
"""Where no model is computed."""


def traffic_of(decoder: Decoder) -> Traffic:
    """The traffic of a loaded model. Norms and the rows of the embedding are too few to count."""
    spec = decoder.spec
    weights = decoder.lm_head.num_bytes
    experts: list[ExpertBytes] = []
    windows: dict[int | None, int] = {}
    per_token = decoder.kv_bytes_per_block(1) // len(decoder.layers)
    for layer, kind in zip(decoder.layers, spec.layers, strict=True):
        weights += _weight_bytes(layer.attention)
        mlp = _weight_bytes(layer.mlp)
        if kind.moe is None:
            weights += mlp
        else:
            experts.append(ExpertBytes(mlp, kind.moe.num_experts, kind.moe.top_k))
        windows[kind.window] = windows.get(kind.window, 0) + per_token
    cached = tuple(KVBytes(per_token, window) for window, per_token in windows.items())
    return Traffic(weights, tuple(experts), cached)


def _weight_bytes(part: Any) -> int:
    """Of all packed weights inside a part of the model."""
    if isinstance(part, (PackedWeight, ExpertWeights)):
        return part.num_bytes
    if isinstance(part, (tuple, list)):
        return sum(_weight_bytes(one) for one in part)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = (field.name for field in dataclasses.fields(part))
        return sum(_weight_bytes(getattr(part, name)) for name in names)
    return 0
