"""Filters, penalties and draws against transformers' warpers and plain counting."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokenfleet.kernels import sampling
from tokenfleet.kernels.backend import using
from tokenfleet.kernels.rng import bits, gumbel, row_keys, splitmix64, uniform
from tokenfleet.kernels.sampling import PenaltyRows, SamplingRows, penalise, sample, warp

GRID = [
    (temperature, top_k, top_p, min_p)
    for temperature in (0.3, 1.0, 2.5)
    for top_k in (0, 1, 7, 1000)
    for top_p in (1.0, 0.9, 0.3, 0.0)
    for min_p in (0.0, 0.05, 1.0)
]


def keys_for(count, seed=0):
    positions = np.arange(count)
    return torch.from_numpy(row_keys(np.full(count, seed, np.uint64), positions * 0, positions))


def rows_of(parameters, vocab):
    temperature, top_k, top_p, min_p = zip(*parameters, strict=True)
    return SamplingRows(
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor([k or vocab for k in top_k]).clamp(max=vocab),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
        keys_for(len(temperature)),
        filtered=any(k or p < 1 or m for _, k, p, m in parameters),
    )


def transformers_warped(logits, parameters):
    temperature, top_k, top_p, min_p = parameters
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros(1, 0, dtype=torch.long), logits.clone())


@pytest.mark.parametrize("vocab", [5, 259, 3001])
def test_the_possible_set_and_its_probabilities_are_transformers(vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(len(GRID), vocab) * 3
    tied = torch.tensor([top_p == 1.0 for _, _, top_p, _ in GRID])  # where all of them stay
    logits[tied] = logits[tied].round()
    got = warp(logits, rows_of(GRID, vocab)).softmax(-1)
    for i, parameters in enumerate(GRID):
        wanted = transformers_warped(logits[i : i + 1], parameters)[0].softmax(-1)
        torch.testing.assert_close(got[i], wanted, atol=1e-5, rtol=1e-4)


@pytest.fixture(params=["reference", "cpp"], autouse=True)
def _each_backend(request):
    with using(request.param):
        yield


@pytest.mark.parametrize("vocab", [5, 300, 3001])
@pytest.mark.parametrize("sharp", [0.1, 1.0, 6.0])
def test_the_fast_draw_is_the_full_sort_draw(vocab, sharp):
    torch.manual_seed(vocab)
    logits = torch.randn(len(GRID), vocab) * sharp
    logits[::2] = logits[::2].bfloat16().float()  # ties, as a model in bf16 makes them
    rows = rows_of(GRID, vocab)
    noise = gumbel(rows.keys, torch.arange(vocab, dtype=torch.int32)[None])
    assert torch.equal(sample(logits, rows), (warp(logits, rows) + noise).argmax(-1))


def test_a_cut_through_equal_logits_takes_the_lowest_ids_on_both_ways():
    torch.manual_seed(0)
    logits = torch.randint(0, 2, (400, 2000)).float()
    rows = rows_of([(1.0, 0, 0.2, 0.0)] * 400, 2000)
    drawn = sample(logits, rows)
    assert torch.isfinite(warp(logits, rows).gather(1, drawn[:, None])).all()


def test_the_fast_draw_falls_back_when_the_cut_lies_deeper(monkeypatch):
    monkeypatch.setattr(sampling, "CANDIDATES", 8)
    logits = torch.randn(len(GRID), 100) * 0.1
    rows = rows_of(GRID, 100)
    noise = gumbel(rows.keys, torch.arange(100, dtype=torch.int32)[None])
    assert torch.equal(sample(logits, rows), (warp(logits, rows) + noise).argmax(-1))


def test_draws_follow_the_distribution():
    count = 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(count, 1)
    drawn = sample(logits, rows_of([(1.0, 0, 1.0, 0.0)] * count, 4))
    shares = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.015, rtol=0)


@pytest.mark.parametrize("vocab", [259, 4096, 49152])
def test_the_best_are_those_of_topk(vocab):
    values = torch.randn(7, vocab)
    for count in (1, 5, 20):
        best, ids = sampling.best_of(values, count)
        wanted = values.topk(count)
        assert torch.equal(best, wanted.values)
        assert torch.equal(ids, wanted.indices)


def test_repetition_penalty_is_transformers_over_prompt_and_output():
    logits = torch.randn(1, 50)
    tokens = torch.tensor([[3, 4, 3, 9, 49]])
    rows = PenaltyRows(
        tokens, torch.tensor([2]), torch.tensor([4]),
        torch.zeros(1), torch.zeros(1), torch.tensor([1.7]),
    )  # fmt: skip
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(tokens[:, :4], logits.clone())
    torch.testing.assert_close(penalise(logits.clone(), rows), wanted)


def test_presence_and_frequency_count_the_output_only_and_no_padding():
    logits = torch.zeros(2, 10)
    rows = PenaltyRows(
        tokens=torch.tensor([[1, 2, 2, 5, 2, 7, 7], [4, 4, 0, 0, 0, 0, 0]]),
        num_prompt=torch.tensor([2, 2]),
        num_tokens=torch.tensor([5, 2]),
        presence=torch.tensor([0.5, 0.5]),
        frequency=torch.tensor([0.25, 0.25]),
        repetition=torch.ones(2),
    )
    expected = torch.zeros(2, 10)
    expected[0, 2] = -0.5 - 2 * 0.25
    expected[0, 5] = -0.5 - 0.25
    torch.testing.assert_close(penalise(logits, rows), expected)


def test_noise_depends_on_seed_choice_position_and_token_alone():
    tokens = torch.arange(1000, dtype=torch.int32)[None]
    key = row_keys(np.array([7], np.uint64), np.array([1]), np.array([30]))
    alone = bits(torch.from_numpy(key), tokens)
    many = row_keys(
        np.array([1, 7, 7, 7], np.uint64), np.array([1, 1, 2, 1]), np.array([30, 30, 30, 31])
    )
    together = bits(torch.from_numpy(many), tokens)
    assert torch.equal(together[1], alone[0])
    for other in (0, 2, 3):
        assert (together[other] == alone[0]).float().mean() < 0.01
    assert torch.equal(bits(torch.from_numpy(key), tokens[:, 100:200])[0], alone[0, 100:200])


def test_the_generator_is_splitmix_and_uniform():
    # first output of the reference implementation for state 0
    assert int(splitmix64(np.array([0], np.uint64))[0]) == 0xE220A8397B1DCDAF
    drawn = bits(keys_for(200), torch.arange(2000, dtype=torch.int32)[None])
    for shift in range(32):
        assert abs(((drawn >> shift) & 1).float().mean().item() - 0.5) < 0.004
    noise = gumbel(keys_for(200), torch.arange(2000, dtype=torch.int32)[None])
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01


def test_noise_is_finite_for_every_bit_pattern_that_can_round():
    extremes = torch.tensor([0, 1, -1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    near_one = -torch.arange(1, 5000, dtype=torch.int32)
    drawn = uniform(torch.cat([extremes, near_one]))
    assert ((drawn > 0) & (drawn < 1)).all()
    assert torch.isfinite(-torch.log(-torch.log(drawn))).all()


def test_a_forbidden_token_never_wins():
    logits = torch.full((2000, 3000), -torch.inf)
    logits[:, 17] = 0.0
    assert (sample(logits, rows_of([(1.0, 0, 1.0, 0.0)] * 2000, 3000)) == 17).all()


@pytest.mark.parametrize("possible", [1, 3, 40])
@pytest.mark.parametrize("top_k", [2, 50])
def test_fewer_possible_tokens_than_top_k_are_drawn_from_as_the_reference_does(possible, top_k):
    logits = torch.full((20, 3000), -torch.inf)
    places = torch.arange(possible) * 71 + 5
    logits[:, places] = torch.linspace(-1.0, 2.0, possible).expand(20, -1)
    rows = rows_of([(0.8, top_k, 0.9, 0.05)] * 20, 3000)
    drawn = sample(logits, rows)
    assert drawn.tolist() == sampling.sample_reference(logits, rows).tolist()
    assert set(drawn.tolist()) <= set(places.tolist())
