"""Log probabilities without a copy of the logits: compiled and reference agree."""

from __future__ import annotations

import pytest
import torch

from tokenfleet.kernels.backend import using
from tokenfleet.kernels.logsumexp import logsumexp


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 1000, 1024, 1025, 49_152])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1000.0])
def test_it_is_what_float64_says(backend: str, width: int, spread: float) -> None:
    torch.manual_seed(width)
    logits = torch.randn(5, width) * spread + 3.0
    with using(backend):
        found = logsumexp(logits)
    expected = logits.double().logsumexp(-1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_what_is_forbidden_has_no_mass(backend: str) -> None:
    logits = torch.randn(3, 100)
    logits[0, 7:] = -torch.inf
    logits[1] = -torch.inf
    with using(backend):
        found = logsumexp(logits)
    torch.testing.assert_close(found[0], logits[0, :7].logsumexp(-1))
    assert found[1] == -torch.inf
    torch.testing.assert_close(found[2], logits[2].logsumexp(-1))


def test_a_view_with_gaps_is_read_as_it_is() -> None:
    logits = torch.randn(4, 200)
    with using("cpp"):
        torch.testing.assert_close(logsumexp(logits[:, ::2]), logits[:, ::2].logsumexp(-1))
