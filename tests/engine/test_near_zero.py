"""Temperatures so low that a division by them would leave the range of a float."""

from __future__ import annotations

import pytest

from tokenfleet.engine import Engine, EngineConfig, SamplingParams

PROMPT = [5, 77, 130, 9]
FILTERS = [{}, {"top_k": 5}, {"top_k": -1}, {"top_p": 0.3}, {"top_p": 0.0}, {"min_p": 0.5}]


@pytest.mark.parametrize("temperature", [1e-45, 1e-9, 9e-6, 1e-5])
def test_a_temperature_near_zero_takes_the_best_token_whatever_the_filters(
    tiny_random, temperature
):
    engine = Engine(
        EngineConfig(tiny_random("llama"), dtype="float32", device="cpu", num_blocks=64)
    )
    same = {"max_tokens": 6, "ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, **same)
    cold = [
        SamplingParams(temperature=temperature, seed=seed, **filters, **same)
        for seed, filters in enumerate(FILTERS)
    ]
    warm = [SamplingParams(temperature=1.0, seed=seed, **same) for seed in range(4)]
    rows = [greedy, *cold, *warm]
    best, *outputs = (output.token_ids for output in engine.generate([PROMPT] * len(rows), rows))
    assert outputs[: len(cold)] == [best] * len(cold)
    assert all(drawn != best for drawn in outputs[len(cold) :]), "a draw would have been another"
