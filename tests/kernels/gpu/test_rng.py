"""Noise is the same function of (seed, choice, position, token id) in numpy, torch and Triton."""

import numpy as np
import pytest
import torch

from tokenfleet.kernels import rng
from tokenfleet.kernels.backend import using

pytestmark = pytest.mark.usefixtures("triton_kernels")


def row_keys(rows):
    """Of seeds over all of 64 bits, choices and positions; the extremes among them."""
    random = np.random.default_rng(5)
    seeds = random.integers(0, 1 << 64, rows, dtype=np.uint64)
    seeds[:4] = [0, 1, (1 << 63), (1 << 64) - 1]
    positions = random.integers(0, 1 << 20, rows)
    positions[:3] = [0, 1, (1 << 31) - 1]
    return torch.from_numpy(rng.row_keys(seeds, random.integers(0, 64, rows), positions))


def test_a_million_triples_draw_identical_bits(device):
    rows, per_row = 1000, 1000
    random = np.random.default_rng(6)
    tokens = torch.from_numpy(random.integers(0, 1 << 18, per_row).astype(np.int32))
    tokens[:3] = torch.tensor([0, 1, (1 << 31) - 1])
    keys = row_keys(rows)
    drawn = rng.bits(keys.to(device), tokens.to(device)).cpu()
    with using("reference"):
        wanted = rng.bits(keys, tokens[None])
    assert drawn.numel() == 1_000_000
    assert torch.equal(drawn, wanted)


def test_gumbel_noise_of_triton_bits_is_finite_and_centred(device):
    keys = row_keys(50).to(device)
    noise = rng.gumbel(keys, torch.arange(2000, dtype=torch.int32, device=device)[None])
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.02
