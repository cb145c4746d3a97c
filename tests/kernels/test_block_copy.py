"""Copy-on-write: a copied block holds all that its source holds, and no other changes."""

import pytest
import torch

from tokenfleet.kernels.block_copy import copy_blocks

SHAPE = (6, 2, 4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_block_goes_with_all_that_belongs_to_it(empty_pool, dtype):
    pool = empty_pool(SHAPE, dtype)
    parts = [x for x in (pool.k, pool.v, pool.k_scales, pool.v_scales) if x is not None]
    for part in parts:
        part.copy_(torch.randint(-100, 100, part.shape))
    before = [part.clone() for part in parts]
    copy_blocks(pool, torch.tensor([2, 5, 1]), torch.tensor([4, -1, 3]))
    for part, old in zip(parts, before, strict=True):
        assert torch.equal(part, old[[0, 1, 2, 1, 2, 5]])
