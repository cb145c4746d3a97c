"""Rotation against the oracle, and the write: these slots and no others."""

import numpy as np
import pytest
import torch

from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.rope_kv import rope_and_write_kv

pytestmark = pytest.mark.usefixtures("backend")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def make_batch(slots, positions):
    rows = len(slots)
    return AttentionBatch(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        kv_lens=torch.ones(rows, dtype=torch.int32),
        block_tables=torch.zeros(rows, 1, dtype=torch.int32),
        slots=torch.tensor(slots),
        positions=torch.tensor(positions),
        num_decodes=rows,
        max_query_len=1,
        max_kv_len=1,
    )


def make_inputs(rows, dim, rot_dim, dtype, *, heads=5, kv_heads=2, block_size=8):
    rng = torch.Generator().manual_seed(rows + dim)
    fused = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=rng).to(dtype)
    q, k, v = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    angles = torch.randn(4096, rot_dim // 2, generator=rng)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    num_blocks = rows // block_size + 4
    shape = (num_blocks, kv_heads, block_size, dim)
    slots = (block_size + torch.randperm((num_blocks - 1) * block_size, generator=rng))[
        :rows
    ].tolist()
    positions = torch.randint(4096, (rows,), generator=rng).tolist()
    views = (
        q.unflatten(-1, (heads, dim)),
        k.unflatten(-1, (kv_heads, dim)),
        v.unflatten(-1, (kv_heads, dim)),
    )
    return *views, cos_sin, shape, slots, positions


@pytest.mark.parametrize("rows", [1, 63, 123, 1000])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "rot_dim"), [(64, 64), (32, 8), (20, 20)])
def test_rotates_and_writes_what_the_oracle_says(oracle, rows, interleaved, dtype, dim, rot_dim):
    q, k, v, cos_sin, shape, slots, positions = make_inputs(rows, dim, rot_dim, dtype)
    pool = KVPool(
        torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    )
    kept = q.clone(), k.clone(), v.clone()
    out = rope_and_write_kv(
        q, k, v, cos_sin, pool, make_batch(slots, positions), interleaved=interleaved
    )
    assert out.dtype == dtype
    q64, k64 = kept[0].double().numpy(), kept[1].double().numpy()
    table, at = cos_sin.double().numpy(), np.array(slots)
    block, offset = at // shape[2], at % shape[2]
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    np.testing.assert_allclose(
        out.double(), oracle.rotate(q64, positions, table, interleaved), **close
    )
    stored = pool.k[block, :, offset].double()
    np.testing.assert_allclose(stored, oracle.rotate(k64, positions, table, interleaved), **close)
    assert torch.equal(pool.v[block, :, offset], kept[2])
    written = torch.zeros(shape[0] * shape[2], dtype=torch.bool)
    written[slots] = True
    untouched = ~written.view(shape[0], shape[2])
    assert pool.k.transpose(1, 2)[untouched].isnan().all()
    assert pool.v.transpose(1, 2)[untouched].isnan().all()


def test_slot_minus_one_writes_nothing():
    q, k, v, cos_sin, shape, slots, positions = make_inputs(9, 64, 64, torch.float32)
    pool = KVPool(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    masked = [slot if i == 4 else -1 for i, slot in enumerate(slots)]
    out = rope_and_write_kv(q, k, v, cos_sin, pool, make_batch(masked, positions))
    assert out.isfinite().all()
    block, offset = divmod(slots[4], shape[2])
    assert pool.k[block, :, offset].isfinite().all()
    pool.k[block, :, offset] = torch.nan
    pool.v[block, :, offset] = torch.nan
    assert pool.k.isnan().all()
    assert pool.v.isnan().all()


@pytest.mark.parametrize("rows", [1, 63, 123])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "rot_dim"), [(64, 64), (128, 96), (32, 8), (20, 20), (80, 20)])
def test_in_int8_each_row_is_rounded_over_its_own_scale(
    oracle, empty_pool, rows, dtype, dim, rot_dim
):
    q, k, v, cos_sin, shape, slots, positions = make_inputs(rows, dim, rot_dim, dtype)
    pool = empty_pool(shape, torch.int8)
    out = rope_and_write_kv(q, k, v, cos_sin, pool, make_batch(slots, positions))
    wide = empty_pool(shape, dtype)
    assert torch.equal(out, rope_and_write_kv(q, k, v, cos_sin, wide, make_batch(slots, positions)))
    at = torch.tensor(slots)
    where = at // shape[2], slice(None), at % shape[2]
    turned = oracle.rotate(k.double().numpy(), positions, cos_sin.double().numpy(), False)
    for codes, scales, exact in (
        (pool.k, pool.k_scales, torch.from_numpy(turned)), (pool.v, pool.v_scales, v.double())
    ):  # fmt: skip
        highest = exact.abs().amax(-1)
        torch.testing.assert_close(scales[where].double(), highest / 127, rtol=1e-5, atol=0)
        held = codes[where].double() * scales[where].double()[..., None]
        # half a step, and what fp32 makes of it
        assert ((held - exact).abs() <= highest[..., None] / 127 * 0.5001).all()
    written = torch.zeros(shape[0] * shape[2], dtype=torch.bool)
    written[slots] = True
    untouched = ~written.view(shape[0], shape[2])
    assert pool.k_scales.transpose(1, 2)[untouched].isnan().all()
    assert (pool.v.transpose(1, 2)[untouched] == -128).all()


def test_in_int8_slot_minus_one_writes_nothing_and_a_nan_marks_its_row(empty_pool):
    q, k, v, cos_sin, shape, slots, positions = make_inputs(9, 64, 64, torch.float32)
    k[5, 0, 3] = v[6, 1, 7] = torch.nan
    v[7] = 0.0
    pool = empty_pool(shape, torch.int8)
    masked = [slot if i in (5, 6, 7) else -1 for i, slot in enumerate(slots)]
    rope_and_write_kv(q, k, v, cos_sin, pool, make_batch(masked, positions))
    block, offset = (torch.tensor(x) for x in zip(*(divmod(s, shape[2]) for s in slots[5:8])))
    k_scales, v_scales = pool.k_scales[block, :, offset], pool.v_scales[block, :, offset]
    assert k_scales.isnan().nonzero().tolist() == [[0, 0]]
    assert v_scales.isnan().nonzero().tolist() == [[1, 1]]
    assert not pool.v[block[2], :, offset[2]].any()
    assert not v_scales[2].any()
    pool.k_scales[block, :, offset] = torch.nan
    assert pool.k_scales.isnan().all()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kv_is_rounded_to_the_dtype_of_the_pool(kv_dtype):
    q, k, v, cos_sin, shape, slots, positions = make_inputs(63, 64, 64, torch.float32)
    wide = KVPool(torch.zeros(shape), torch.zeros(shape))
    narrow = KVPool(torch.zeros(shape, dtype=kv_dtype), torch.zeros(shape, dtype=kv_dtype))
    batch = make_batch(slots, positions)
    exact = rope_and_write_kv(q.clone(), k.clone(), v, cos_sin, wide, batch)
    rounded = rope_and_write_kv(q.clone(), k.clone(), v, cos_sin, narrow, batch)
    assert torch.equal(exact, rounded)
    assert torch.equal(wide.k.to(kv_dtype), narrow.k)
    assert torch.equal(wide.v.to(kv_dtype), narrow.v)
