"""A mixture's products in one launch are those expert by expert, and ask the host for nothing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenfleet.kernels import fp8, moe
from tokenfleet.kernels.fp8 import Fp8Scales
from tokenfleet.kernels.gpu import moe as gpu
from tokenfleet.kernels.gpu.launch import TARGETS, recording
from tokenfleet.kernels.moe import ExpertWeights, expert_product, sort_visits

pytestmark = pytest.mark.usefixtures("triton_kernels")

EXPERTS, OUTPUTS, INPUTS, TOP_K = 5, 40, 200, 2


def draw(shape, seed, device, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def weights_of(form, device, dtype=torch.bfloat16):
    wide = draw((EXPERTS, OUTPUTS, INPUTS), 2, device, dtype) / INPUTS**0.5
    if form == "wide":
        return ExpertWeights(wide)
    parts = [fp8.quantize_weight(one, "rows" if form == "rows" else "blocks") for one in wide]
    first = parts[0][1]
    scales = Fp8Scales(
        torch.cat([s.weight for _, s in parts]), first.rows, first.columns,
        "none" if form == "weights only" else first.activations,
    )  # fmt: skip
    return ExpertWeights(torch.stack([codes for codes, _ in parts]), scales)


@pytest.mark.parametrize(
    ("form", "entering", "tokens"),
    [
        ("wide", True, 1), ("wide", True, 23), ("wide", False, 23), ("blocks", True, 1),
        ("blocks", True, 23), ("blocks", False, 7), ("rows", True, 7), ("rows", False, 23),
        ("weights only", True, 7),
    ],
)  # fmt: skip
def test_one_launch_is_expert_by_expert(device, tokens, form, entering):
    chosen = torch.randint(
        0, EXPERTS - 1, (tokens, TOP_K), generator=torch.Generator().manual_seed(1)
    )
    visits = sort_visits(chosen.to(device), EXPERTS)  # the last expert is visited by nobody
    x = draw((tokens if entering else tokens * TOP_K, INPUTS), 3, device)
    weights = weights_of(form, device)
    out = expert_product(x, weights, visits, entering=entering)
    expected = moe.reference(x, weights, visits, entering=entering)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


def test_all_rows_may_go_to_one_expert(device):
    visits = sort_visits(torch.full((70, 1), 3, device=device), EXPERTS)
    x, weights = draw((70, INPUTS), 3, device), weights_of("wide", device)
    out = expert_product(x, weights, visits, entering=True)
    expected = x.double() @ weights.data[3].double().t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


def test_visits_are_grouped_by_expert_in_the_order_of_tokens(device):
    chosen = torch.tensor([[2, 0], [0, 3], [2, 3]], device=device)
    visits = sort_visits(chosen, 5)
    assert visits.order.tolist() == [1, 2, 0, 4, 3, 5]
    assert visits.starts.tolist() == [0, 2, 2, 4, 6, 6]


def test_a_mixture_is_launched_without_a_look_at_the_device():
    with recording(TARGETS[90]) as launches, FakeTensorMode():
        chosen = torch.zeros((6, 2), dtype=torch.int64, device="cuda")
        x = torch.zeros((6, 256), dtype=torch.bfloat16, device="cuda")
        weights = ExpertWeights(torch.zeros((8, 64, 256), dtype=torch.bfloat16, device="cuda"))
        gpu.expert_product(x, weights, sort_visits(chosen, 8), entering=True)
    assert [launch.name for launch in launches] == ["_expert_product"]
