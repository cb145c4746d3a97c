"""A mixture of experts' products: every row times the weight of its own expert.

Rows are sorted by expert, in place of a loop over experts; how many rows an expert has is known to
the device alone. A row's result does not depend on which other rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenfleet.kernels import fp8
from tokenfleet.kernels.backend import uses_triton
from tokenfleet.kernels.fp8 import Fp8Rows, Fp8Scales
from tokenfleet.kernels.linear import PackedWeight


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights [E, N, K] of one projection of all experts."""

    data: Tensor
    """[E, N, K] in the dtype of inputs and outputs, or FP8 codes."""
    fp8: Fp8Scales | None = None
    """Set for codes: its `weight` has E times as many rows as one expert's, one below the other;
    static activations have one scale for all experts."""

    @property
    def rounding(self) -> Fp8Scales | None:
        """How inputs are rounded to FP8, for whoever makes them; None: they are not."""
        return self.fp8 if self.fp8 is not None and self.fp8.activations != "none" else None

    @property
    def num_bytes(self) -> int:
        """What reading all experts once reads."""
        return self.data.nbytes + (0 if self.fp8 is None else self.fp8.num_bytes)

    def one(self, expert: int) -> tuple[Tensor, Fp8Scales | None]:
        """One expert's weight, and its scales."""
        if self.fp8 is None:
            return self.data[expert], None
        rows = self.fp8.weight.shape[0] // self.data.shape[0]
        scales = Fp8Scales(
            self.fp8.weight[expert * rows : (expert + 1) * rows],
            self.fp8.rows, self.fp8.columns, self.fp8.activations, self.fp8.input,
        )  # fmt: skip
        return self.data[expert], scales


def stack_experts(packed: Iterable[PackedWeight], count: int) -> ExpertWeights:
    """The weights of `count` experts, equal in shape and form, as one; they must be plain or FP8.

    Static activations are rounded for all experts by the largest of their scales.
    """
    whole: Tensor | None = None
    scales: list[Fp8Scales] = []
    for expert, one in enumerate(packed):
        if one.layout not in ("plain", "fp8"):
            raise ValueError(f"experts in the layout {one.layout!r} cannot be stacked")
        if whole is None:
            whole = torch.empty(
                (count, *one.data.shape), dtype=one.data.dtype, device=one.data.device
            )
        if one.data.dtype != whole.dtype:
            raise ValueError(f"expert {expert} is in another form than those before it")
        whole[expert].copy_(one.data)
        if one.fp8 is not None:
            scales.append(one.fp8)
    assert whole is not None
    if not scales:
        return ExpertWeights(whole)
    first = scales[0]
    inputs = [s.input for s in scales if s.input is not None]
    return ExpertWeights(
        whole,
        Fp8Scales(
            torch.cat([s.weight for s in scales]), first.rows, first.columns, first.activations,
            torch.stack(inputs).amax(0) if inputs else None,
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Visits:
    """Which rows go to which expert, for T tokens that visit `top_k` experts each."""

    order: Tensor
    """int64 [T top_k]: visits grouped by expert, in the order of the tokens; visit v is the
    v % top_k-th of token v // top_k."""
    starts: Tensor
    """int64 [E + 1]: expert e has order[starts[e] : starts[e + 1]]."""
    top_k: int


def sort_visits(chosen: Tensor, num_experts: int) -> Visits:
    """chosen int64 [T, top_k] expert ids -> Visits. Nothing goes to the host."""
    ordered, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(num_experts + 1, device=chosen.device, dtype=chosen.dtype)
    return Visits(order, torch.searchsorted(ordered, experts), chosen.shape[1])


def expert_product(
    x: Tensor | Fp8Rows, weights: ExpertWeights, visits: Visits, *, entering: bool
) -> Tensor:
    """[T top_k, N]: rows of x times the weights of their experts, in x's dtype.

    entering: x is [T, K], a row for each token, and row i of the result belongs to visit
    order[i]. Otherwise x is [T top_k, K] in that order, and row v of the result to visit v.
    """
    if uses_triton(weights.data):
        from tokenfleet.kernels.gpu import moe as gpu

        return gpu.expert_product(x, weights, visits, entering=entering)
    return reference(x, weights, visits, entering=entering)


def reference(
    x: Tensor | Fp8Rows, weights: ExpertWeights, visits: Visits, *, entering: bool
) -> Tensor:
    """The specification: expert by expert, sums in fp32, rounded once."""
    dtype = x.dtype
    values = x.wide() if isinstance(x, Fp8Rows) else x
    out = torch.empty((len(visits.order), weights.data.shape[1]), dtype=dtype, device=values.device)
    starts = visits.starts.tolist()
    for expert in range(weights.data.shape[0]):
        rows = slice(starts[expert], starts[expert + 1])
        codes, scales = weights.one(expert)
        mine = values[visits.order[rows] // visits.top_k] if entering else values[rows]
        if scales is None:
            result = mine.float() @ codes.float().t()
        else:
            given = mine if isinstance(x, Fp8Rows) else fp8.rounded_inputs(mine, scales)
            result = given @ fp8.dequantize(codes, scales).t()
        out[rows if entering else visits.order[rows]] = result.to(dtype)
    return out
