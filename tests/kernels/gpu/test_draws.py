"""Filters, penalties and draws in Triton against their specification in torch."""

import numpy as np
import pytest
import torch

from tokenfleet.kernels.backend import using
from tokenfleet.kernels.gpu.launch import TARGETS, recording
from tokenfleet.kernels.rng import gumbel, row_keys
from tokenfleet.kernels.sampling import (
    PenaltyRows,
    SamplingRows,
    penalise,
    penalise_reference,
    sample,
    warp,
)

pytestmark = [
    pytest.mark.usefixtures("triton_kernels"),
    # numpy, which interprets, warns of the infinities that are meant
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
]

GRID = [  # temperature, top-k, top-p, min-p; a row takes the interpreter a tenth of a second
    (1.0, 0, 1.0, 0.0), (0.3, 7, 1.0, 0.0), (2.5, 0, 0.9, 0.0), (0.3, 0, 1.0, 0.05),
    (2.5, 200, 0.9, 0.05), (0.3, 7, 0.3, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 0.0, 0.0),
    (2.5, 0, 1.0, 1.0), (0.3, 200, 0.9, 0.0), (2.5, 0, 0.3, 0.05), (2.5, 7, 0.999999, 1e-9),
]  # fmt: skip


def rows_of(parameters, vocab, device, seed=0):
    temperature, top_k, top_p, min_p = zip(*parameters, strict=True)
    positions = np.arange(len(parameters))
    keys = row_keys(np.full(len(parameters), seed, np.uint64), positions * 0, positions)
    return SamplingRows(
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor([k or vocab for k in top_k], device=device).clamp(max=vocab),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
        torch.from_numpy(keys).to(device),
        filtered=any(k or p < 1 or m for _, k, p, m in parameters),
    )


def drawn_by_sorting(logits, rows):
    with using("reference"):
        tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        return (warp(logits, rows) + gumbel(rows.keys, tokens[None])).argmax(-1)


@pytest.mark.parametrize(("vocab", "sharp"), [(1, 1.0), (63, 0.1), (63, 6.0), (1100, 1.0)])
def test_the_draw_without_sorting_is_the_draw_with_it(device, vocab, sharp):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(GRID), vocab, generator=generator) * sharp
    logits[::2] = logits[::2].bfloat16().float()  # ties, as a model in bf16 makes them
    logits = logits.to(device)
    rows = rows_of(GRID, vocab, device)
    before = logits.clone()
    assert torch.equal(sample(logits, rows), drawn_by_sorting(logits, rows))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [63, 1000, 5000])
def test_a_plain_draw_is_the_gumbel_maximum(device, vocab):
    logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(3)).to(device)
    rows = rows_of([(0.7, 0, 1.0, 0.0)] * 20, vocab, device)
    assert not rows.filtered
    assert torch.equal(sample(logits, rows), drawn_by_sorting(logits, rows))


def test_a_cut_through_equal_logits_keeps_the_lowest_ids(device):
    logits = torch.randint(0, 2, (3, 1100), generator=torch.Generator().manual_seed(0)).float()
    logits, rows = logits.to(device), rows_of([(1.0, 0, 0.2, 0.0)] * 3, 1100, device)
    drawn = sample(logits, rows)
    assert torch.isfinite(warp(logits, rows).gather(1, drawn[:, None])).all()


def test_one_binary_finds_the_cuts_of_any_number_of_rows():
    keys = set()
    for R in (1, 2, 16, 17, 128):
        one = torch.empty(R, device="meta")
        rows = SamplingRows(one, one.long(), one, one, torch.empty(R, 2, device="meta").int(), True)
        with recording(TARGETS[90]) as launches:
            sample(torch.empty(R, 151936, device="meta"), rows)
        found = {
            launch.key() for launch in launches if launch.name in ("_tops", "_narrow", "_finish")
        }
        keys.add(frozenset(found))
    (same,) = keys
    assert len(same) == 7


def test_signs_and_zeros_are_ordered_as_floats_are(device):
    values = torch.tensor([-2.0, -0.0, 0.0, 1e-40, -1e-40, -3.0, 2.0, -torch.inf])
    logits = values.repeat(2, 1).to(device)
    for top_k, possible in ((1, {6}), (2, {6, 3}), (3, {6, 3, 1, 2}), (5, {6, 3, 1, 2, 4})):
        rows = rows_of([(5.0, top_k, 1.0, 0.0)] * 2, 8, device)
        drawn = sample(logits, rows)
        assert set(drawn.tolist()) <= possible
        assert torch.equal(drawn, drawn_by_sorting(logits, rows))


@pytest.mark.parametrize("parameters", [(1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.1)])
def test_a_forbidden_token_never_wins_and_a_broken_row_gives_some_id(device, parameters):
    logits = torch.full((5, 600), -torch.inf)
    logits[:, 570] = 0.0
    logits[1], logits[2], logits[3] = -torch.inf, torch.nan, torch.inf
    drawn = sample(logits.to(device), rows_of([parameters] * 5, 600, device))
    assert ((drawn >= 0) & (drawn < 600)).all()
    assert (drawn.cpu()[[0, 4]] == 570).all()


@pytest.mark.parametrize("length", [1, 63, 300])
def test_penalties_are_those_of_the_specification(device, length):
    random = torch.Generator().manual_seed(length)
    R, vocab = 5, 50
    rows = PenaltyRows(
        tokens=torch.randint(0, vocab, (R, length), generator=random).to(device),
        num_prompt=torch.tensor([0, 1, length // 2, length, length // 3], device=device),
        num_tokens=torch.tensor([1, 1, length, length, max(1, length // 2)], device=device),
        presence=torch.tensor([0.5, 0.0, -1.0, 0.3, 2.0], device=device),
        frequency=torch.tensor([0.25, 0.1, 0.0, 0.5, -0.3], device=device),
        repetition=torch.tensor([1.7, 1.0, 0.6, 1.3, 1.1], device=device),
    )
    logits = torch.randn(R, vocab, generator=random).to(device)
    expected = penalise_reference(logits.clone(), rows)
    assert penalise(logits, rows) is logits
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_placeholders_in_a_history_are_never_counted(device):
    tokens = torch.tensor([[3, -1, 4, -1]], device=device)
    ones, two = torch.ones(1, device=device), torch.tensor([2], device=device)
    rows = PenaltyRows(tokens, two - 1, two + 2, ones, ones, ones * 2)
    expected = torch.full((1, 6), 8.0)
    expected[0, 3], expected[0, 4] = 4.0, 4.0 - 2.0
    logits = penalise(torch.full((1, 6), 8.0, device=device), rows)
    assert torch.equal(logits.cpu(), expected)
