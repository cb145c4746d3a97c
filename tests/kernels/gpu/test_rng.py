"""Noise is the same function of (seed, choice, position, token id) in numpy, torch and Triton."""

import numpy as np
import pytest
import torch

from tokenfleet.kernels import rng
from tokenfleet.kernels.backend import using

pytestmark = pytest.mark.usefixtures("triton_kernels")


def columns(rows):
    """Seeds over all of 64 bits, choices, positions; the extremes among them."""
    random = np.random.default_rng(5)
    seeds = random.integers(0, 1 << 64, rows, dtype=np.uint64)
    seeds[:4] = [0, 1, (1 << 63), (1 << 64) - 1]
    positions = random.integers(0, 1 << 20, rows)
    positions[:3] = [0, 1, (1 << 31) - 1]
    return seeds, random.integers(0, 64, rows), positions


def on(device, *arrays):
    return [torch.from_numpy(a.view(np.int64)).to(device) for a in arrays]


def test_a_million_triples_draw_identical_bits(device):
    rows, per_row = 1000, 1000
    seeds, choices, positions = columns(rows)
    random = np.random.default_rng(6)
    tokens = torch.from_numpy(random.integers(0, 1 << 18, per_row).astype(np.int32))
    tokens[:3] = torch.tensor([0, 1, (1 << 31) - 1])
    keys = rng.device_row_keys(*on(device, seeds, choices, positions))
    drawn = rng.bits(keys, tokens.to(device)).cpu()
    with using("reference"):
        wanted = rng.bits(torch.from_numpy(rng.row_keys(seeds, choices, positions)), tokens[None])
    assert drawn.numel() == 1_000_000
    assert torch.equal(drawn, wanted)


@pytest.mark.parametrize("rows", [1, 63, 1000])
def test_keys_are_those_that_numpy_makes(device, rows):
    seeds, choices, positions = (column[:rows] for column in columns(max(rows, 4)))
    wanted = torch.from_numpy(rng.row_keys(seeds, choices, positions))
    assert torch.equal(rng.device_row_keys(*on(device, seeds, choices, positions)).cpu(), wanted)
    with using("reference"):
        assert torch.equal(rng.device_row_keys(*on("cpu", seeds, choices, positions)), wanted)


def test_gumbel_noise_of_triton_bits_is_finite_and_centred(device):
    seeds, choices, positions = columns(50)
    keys = rng.device_row_keys(*on(device, seeds, choices, positions))
    noise = rng.gumbel(keys, torch.arange(2000, dtype=torch.int32, device=device)[None])
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.02
