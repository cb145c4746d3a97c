"""The compiled best token of a row is torch's, ties, NaN and infinities included."""

import pytest
import torch

from tokenfleet.kernels.backend import using
from tokenfleet.kernels.sampling import greedy

WIDTHS = [1, 5, 16, 17, 63, 64, 65, 300, 49_152]


@pytest.fixture(autouse=True)
def cpp():
    with using("cpp"):
        yield


def check(logits):
    values, ids = greedy(logits)
    best = logits.max(dim=-1)
    assert ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(values, best.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_random_rows(width):
    check(torch.randn(7, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_ties_go_to_the_lowest_id(width):
    check(torch.randint(-1, 2, (40, width)).float())
    check(torch.zeros(3, width))
    check(torch.where(torch.rand(5, width) < 0.5, 0.0, -0.0))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_best_may_stand_anywhere(width):
    places = torch.arange(min(width, 130))
    logits = torch.full((len(places), width), -3.0)
    logits[places, width - 1 - places] = 2.0
    check(logits)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_nan_is_the_best_and_the_first_one_is_named(width):
    logits = torch.randn(6, width)
    logits[0, 0] = logits[1, width - 1] = logits[2, width // 2] = torch.nan
    logits[3] = torch.nan
    logits[4, width // 2] = torch.inf
    check(logits)


def test_rows_of_nothing_but_minus_infinity_give_their_first_token():
    check(torch.full((2, 100), -torch.inf))


def test_no_rows_give_no_tokens():
    values, ids = greedy(torch.empty(0, 10))
    assert values.shape == ids.shape == (0,)
