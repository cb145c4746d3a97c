"""Norm, rotation and write in one kernel: against the reference, into these slots and no others."""

import pytest
import torch

from tokenfleet.kernels.backend import using
from tokenfleet.kernels.gpu.launch import TARGETS, planning
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.rope_kv import HeadNorms, rope_and_write_kv

pytestmark = pytest.mark.usefixtures("triton_kernels")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FP8 = torch.float8_e4m3fn
HEADS, KV_HEADS, BLOCK = 2, 1, 8


def make_batch(slots, positions):
    rows, one = len(slots), torch.zeros(2, dtype=torch.int32, device=slots.device)
    return AttentionBatch(one, one, one[None], slots, positions, rows, 1, 1)


def make(rows, dim, rot_dim, dtype, device):
    """q, k, v as views into one projection, a table, slots (every seventh -1), positions."""
    rng = torch.Generator().manual_seed(rows + dim)
    fused = torch.randn(rows, HEADS + 2 * KV_HEADS, dim, generator=rng).to(dtype).to(device)
    angles = torch.randn(512, rot_dim // 2, generator=rng)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
    slots = BLOCK + torch.randperm(rows + 2 * BLOCK, generator=rng)[:rows]
    slots[3::7] = -1
    positions = torch.randint(512, (rows,), generator=rng)
    views = fused.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
    return *views, table, make_batch(slots.to(device), positions.to(device))


def check(
    rows, dim, rot_dim, dtype, device, guarded, *, kv_dtype=None, scales=(1.0, 1.0), **options
):
    q, k, v, table, batch = make(rows, dim, rot_dim, dtype, device)
    shape = (rows // BLOCK + 5, KV_HEADS, BLOCK, dim)
    mine = KVPool(*(guarded(shape, kv_dtype or dtype) for _ in "kv"), *scales)
    expected = KVPool(mine.k.clone(), mine.v.clone(), *scales)
    out = rope_and_write_kv(q, k, v, table, mine, batch, **options)
    with using("reference"):
        same = rope_and_write_kv(q, k, v, table, expected, batch, **options)
    assert out.dtype == dtype
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out, same, **close)
    if kv_dtype == FP8:  # a value within rounding of the middle may take the next code
        close = {"rtol": 0.13, "atol": 2.0**-9}
    written = [(a.float(), b.float()) for a, b in ((mine.k, expected.k), (mine.v, expected.v))]
    for got, wanted in written:
        assert torch.equal(got.isnan(), wanted.isnan())  # poison where nobody has written
        torch.testing.assert_close(got, wanted, equal_nan=True, **close)
    return written


@pytest.mark.parametrize(
    ("rows", "interleaved"), [(1, False), (63, False), (123, True), (1000, False)]
)
def test_rotates_and_writes_what_the_reference_does(rows, interleaved, device, guarded):
    check(rows, 32, 32, torch.float32, device, guarded, interleaved=interleaved)


@pytest.mark.parametrize(
    ("dtype", "interleaved"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, True)],
    ids=str,
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("dim", "rot_dim"), [(64, 64), (80, 20), (96, 96), (256, 64)])
def test_partial_rotation_norms_and_dtypes(
    dim, rot_dim, normed, interleaved, dtype, device, guarded
):
    weights = torch.randn(2, dim, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    norms = HeadNorms(weights[0], weights[1], 1e-5, 1.0) if normed else None
    check(5, dim, rot_dim, dtype, device, guarded, interleaved=interleaved, norms=norms)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("rows", [5, 123])
def test_fp8_codes_are_of_the_value_over_the_scale(arch, rows, device, guarded):
    with planning(TARGETS[arch]):
        (got, wanted), (got_v, wanted_v) = check(
            rows, 64, 64, torch.bfloat16, device, guarded, kv_dtype=FP8, scales=(0.004, 2.0)
        )
    assert (got[got.isfinite()].abs() == 448).any()  # some are cut
    assert (got != wanted).logical_and(~got.isnan()).float().mean() < 0.01
    assert torch.equal(got_v.nan_to_num(9e9), wanted_v.nan_to_num(9e9))


@pytest.mark.parametrize("arch", [80, 90])
def test_nan_is_written_as_nan(arch, device):
    q, k, v, table, batch = make(1, 32, 32, torch.bfloat16, device)
    pool = KVPool(*(torch.zeros(4, KV_HEADS, BLOCK, 32, device=device).to(FP8) for _ in "kv"))
    v[0, 0, 5] = torch.nan
    with planning(TARGETS[arch]):
        rope_and_write_kv(q, k, v, table, pool, batch)
    block, offset = divmod(int(batch.slots[0]), BLOCK)
    assert pool.v[block, 0, offset].float().isnan().nonzero().flatten().tolist() == [5]


def test_kv_is_rounded_to_the_dtype_of_the_pool(device):
    q, k, v, table, batch = make(9, 64, 64, torch.float32, device)
    wide, narrow = (
        KVPool(*(torch.zeros(5, KV_HEADS, BLOCK, 64, dtype=dtype, device=device) for _ in "kv"))
        for dtype in (torch.float32, torch.bfloat16)
    )
    rope_and_write_kv(q, k, v, table, wide, batch)
    rope_and_write_kv(q, k, v, table, narrow, batch)
    assert torch.equal(wide.k.bfloat16(), narrow.k)
    assert torch.equal(wide.v.bfloat16(), narrow.v)


def test_a_step_of_padding_rows_writes_nothing(device, guarded):
    q, k, v, table, batch = make(5, 32, 32, torch.float32, device)
    batch.slots.fill_(-1)
    batch.positions.zero_()
    pool = KVPool(*(guarded((4, KV_HEADS, BLOCK, 32), torch.float32) for _ in "kv"))
    out = rope_and_write_kv(q, k, v, table, pool, batch)
    assert out.isfinite().all()
    assert pool.k.isnan().all()
    assert pool.v.isnan().all()
