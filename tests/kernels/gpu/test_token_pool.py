"""Ids that the device keeps: gathered and scattered by slot."""

import pytest
import torch

from tokenfleet.kernels.token_pool import (
    gather_reference,
    gather_tokens,
    scatter_reference,
    scatter_tokens,
)

pytestmark = pytest.mark.usefixtures("triton_kernels")

SIZES = [1, 63, 123, 1000]


def make(count, device):
    rng = torch.Generator().manual_seed(count)
    slots = torch.randperm(count + 7, generator=rng)[:count]
    slots[::5] = -1
    ids = torch.randint(1 << 40, (count,), generator=rng)
    pool = torch.randint(1 << 40, (count + 7,), generator=rng)
    chosen = torch.rand(count, generator=rng) < 0.5
    return ids.to(device), pool.to(device), slots.to(device), chosen.to(device)


@pytest.mark.parametrize("count", SIZES)
def test_gathers_from_the_pool_only_where_asked(count, device):
    ids, pool, slots, chosen = make(count, device)
    expected = gather_reference(ids, pool, slots, chosen)
    assert torch.equal(gather_tokens(ids, pool, slots, chosen), expected)
    for i in range(count):
        pooled = 0 if slots[i] < 0 else int(pool[slots[i]])
        assert int(expected[i]) == (pooled if chosen[i] else int(ids[i]))


@pytest.mark.parametrize("count", SIZES)
def test_scatters_to_named_slots_and_to_no_other(count, device, guarded):
    ids, pool, slots, _ = make(count, device)
    mine = guarded(pool.shape, torch.int64)
    mine.copy_(pool)
    scatter_tokens(ids, mine, slots)
    scatter_reference(ids, pool, slots)
    assert torch.equal(mine, pool)
    for i in range(count):
        assert slots[i] < 0 or pool[slots[i]] == ids[i]


def test_a_slot_that_is_not_asked_for_is_not_read(device):
    ids, pool, _, _ = make(63, device)
    far = torch.full((63,), 1 << 50, device=device)
    nothing = torch.zeros(63, dtype=torch.bool, device=device)
    assert torch.equal(gather_tokens(ids, pool, far, nothing), ids)
