"""Blocks that are copied, and blocks that are not."""

import pytest
import torch

from tokenfleet.kernels.block_copy import copy_blocks
from tokenfleet.kernels.block_copy import reference as copy_reference
from tokenfleet.kernels.paged_attention import KVPool

pytestmark = pytest.mark.usefixtures("triton_kernels")


def make(guarded, dtype, heads, size, dim):
    """A pool between guard zones, filled, and its twin."""
    rng = torch.Generator().manual_seed(dim)
    pool = KVPool(*(guarded((16, heads, size, dim), dtype) for _ in "kv"))
    for x in (pool.k, pool.v):
        x.view(torch.uint8).copy_(
            torch.randint(120, x.view(torch.uint8).shape, dtype=torch.uint8, generator=rng)
        )
    return pool, KVPool(pool.k.clone(), pool.v.clone())


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize(("heads", "size", "dim"), [(1, 1, 1), (3, 7, 3), (1, 41, 3), (4, 16, 64)])
def test_named_blocks_are_copied_and_no_other_changes(dtype, heads, size, dim, guarded, device):
    pool, twin = make(guarded, dtype, heads, size, dim)
    sources = torch.tensor([3, 5, 3, 9], device=device)
    targets = torch.tensor([1, 15, -1, 7], device=device)
    copy_blocks(pool, sources, targets)
    for now, before in ((pool.k, twin.k), (pool.v, twin.v)):
        for source, target in ((3, 1), (5, 15), (9, 7)):
            assert same(now[target], before[source])
        untouched = [i for i in range(16) if i not in (1, 15, 7)]
        assert same(now[untouched], before[untouched])


def test_the_reference_copies_the_same(guarded, device):
    pool, twin = make(guarded, torch.bfloat16, 2, 8, 16)
    pairs = torch.tensor([[3, 1], [5, -1], [9, 7]], device=device)
    copy_blocks(pool, pairs[:, 0], pairs[:, 1])
    copy_reference(twin, pairs[:, 0], pairs[:, 1])
    assert same(pool.k, twin.k)
    assert same(pool.v, twin.v)


def test_no_pair_copies_nothing(guarded, device):
    pool, twin = make(guarded, torch.bfloat16, 2, 8, 16)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    copy_blocks(pool, none, none)
    assert same(pool.k, twin.k)
