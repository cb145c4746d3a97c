"""The dtype measurement: its rule exactly, its outcome only for being one of the candidates."""

import pytest
import torch

from tokenfleet.kernels.dtype_choice import choose_dtype, fastest, measure_dtypes

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def test_a_tie_goes_to_the_preferred_dtype():
    assert fastest({FP32: 1.1, BF16: 1.0}) is FP32
    assert fastest({BF16: 1.0, FP32: 1.1}) is BF16


def test_a_clear_winner_is_taken_wherever_it_stands():
    assert fastest({FP32: 2.0, BF16: 1.0, FP16: 1.5}) is BF16
    assert fastest({FP32: 2.0, BF16: 1.5, FP16: 1.0}) is FP16


def test_every_candidate_is_measured_and_one_is_chosen():
    threads = torch.get_num_threads()
    costs = measure_dtypes([FP32, BF16])
    assert torch.get_num_threads() == threads
    assert set(costs) == {FP32, BF16}
    assert all(cost > 0 for cost in costs.values())
    assert choose_dtype([FP16, BF16]) in (FP16, BF16)


def test_without_a_choice_nothing_is_measured(monkeypatch):
    monkeypatch.setattr("tokenfleet.kernels.dtype_choice.measure_dtypes", None)
    assert choose_dtype([FP16]) is FP16
    assert choose_dtype([FP32, BF16], device="cuda") is BF16
    with pytest.raises(ValueError, match="at least one"):
        choose_dtype([])
