"""The two kinds of MLP of a decoder layer: dense, and a router over experts.

Rows are independent: which tokens share a step changes the grouping by expert, never a row's sum,
whose terms are always added in the order of its own choices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenfleet.engine.model.spec import Activation
from tokenfleet.kernels.activation import gelu_tanh_mul, gelu_tanh_mul_fp8, silu_mul, silu_mul_fp8
from tokenfleet.kernels.fp8 import Fp8Rows, Fp8Scales
from tokenfleet.kernels.gated_mlp import gated_mlp
from tokenfleet.kernels.linear import Int8Rows, PackedWeight, Rounding, linear
from tokenfleet.kernels.moe import ExpertWeights, expert_product, sort_visits

GATES: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_tanh_mul,
}


FP8_GATES: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Fp8Scales], Fp8Rows]] = {
    silu_mul: silu_mul_fp8,
    gelu_tanh_mul: gelu_tanh_mul_fp8,
}
"""Each gate, with the rounding of its result in the same pass."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """x [T, H] -> down(act(gate) * up) [T, H]."""

    gate_up: PackedWeight  # [2 I, H]: gate rows, then up rows
    down: PackedWeight  # [H, I]
    gate: Callable[[Tensor], Tensor]

    @property
    def rounding(self) -> Rounding | None:
        """How the inputs may be rounded by whoever makes them; None: not at all."""
        return self.gate_up.rounding

    def __call__(self, x: Tensor | Fp8Rows | Int8Rows) -> Tensor:
        """Inputs may be rounded as `rounding` says."""
        into = self.down.rounding
        if not isinstance(into, Fp8Scales):
            return gated_mlp(x, self.gate_up, self.down, self.gate)
        return linear(FP8_GATES[self.gate](linear(x, self.gate_up), into), self.down)


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """x [T, H] -> the sum over each token's top_k experts, weighted by the router [T, H].

    On a CPU: the counts per expert go to the host, one synchronisation a layer.
    """

    router: PackedWeight  # [E, H]
    experts: tuple[DenseMlp, ...]
    top_k: int
    renormalize: bool

    @property
    def rounding(self) -> Fp8Scales | None:
        """None: the router needs the inputs as they are."""
        return None

    def __call__(self, x: Tensor | Fp8Rows | Int8Rows) -> Tensor:
        """Inputs as they are, not rounded."""
        assert isinstance(x, Tensor)
        weights, chosen = route(x, self.router, self.top_k, renormalize=self.renormalize)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # visits grouped by expert, tokens in order within
        grouped = x[order // self.top_k]
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        visits = torch.empty_like(grouped)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                visits[order[start : start + count]] = expert(grouped[start : start + count])
                start += count
        by_token = visits.view(-1, self.top_k, x.shape[1])
        return (by_token * weights[..., None]).sum(dim=1)


@dataclass(frozen=True, slots=True)
class GroupedMoeMlp:
    """The same as MoeMlp, all experts in one product each way; nothing goes to the host."""

    router: PackedWeight  # [E, H]
    gate_up: ExpertWeights  # [E, 2 I, H]
    down: ExpertWeights  # [E, H, I]
    gate: Callable[[Tensor], Tensor]
    top_k: int
    renormalize: bool

    @property
    def rounding(self) -> Fp8Scales | None:
        """None: the router needs the inputs as they are."""
        return None

    def __call__(self, x: Tensor | Fp8Rows | Int8Rows) -> Tensor:
        """Inputs as they are, not rounded."""
        assert isinstance(x, Tensor)
        weights, chosen = route(x, self.router, self.top_k, renormalize=self.renormalize)
        visits = sort_visits(chosen, self.gate_up.data.shape[0])
        wide = expert_product(x, self.gate_up, visits, entering=True)
        into = self.down.rounding
        hidden = self.gate(wide) if into is None else FP8_GATES[self.gate](wide, into)
        by_visit = expert_product(hidden, self.down, visits, entering=False)
        by_token = by_visit.view(-1, self.top_k, x.shape[1])
        return (by_token * weights[..., None]).sum(dim=1)


def route(
    x: Tensor, router: PackedWeight, top_k: int, *, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Weights in x's dtype and expert ids, both [T, top_k]; softmax over all, in fp32."""
    probabilities = torch.softmax(linear(x, router).float(), dim=-1)
    weights, chosen = probabilities.topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), chosen
