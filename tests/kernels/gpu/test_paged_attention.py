"""The unified attention kernel against the float64 oracle, over pools of NaN where nothing is."""

import dataclasses

import numpy as np
import pytest
import torch

from tokenfleet.kernels.gpu import paged_attention as gpu
from tokenfleet.kernels.gpu.launch import TARGETS, planning, recording
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool, paged_attention, reference

pytestmark = pytest.mark.usefixtures("triton_kernels")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED = ([1, 1, 5, 30], [1, 123, 5, 63])
LIMITS = {"window": 50, "softcap": 20.0, "sinks": True}
VARIANTS = {
    "plain": {},
    "window": {"window": 16},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": LIMITS,
}
FP8 = torch.float8_e4m3fn


def on(paged, device):
    """The same batch and pool on a device."""
    batch = paged.batch
    moved = {
        f.name: value.to(device)
        for f in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, f.name), torch.Tensor)
    }
    pool = KVPool(paged.pool.k.to(device), paged.pool.v.to(device))
    return dataclasses.replace(batch, **moved), pool


def guarded_pool(pool, guarded):
    """The same blocks between guard zones."""
    copies = [guarded(x.shape, x.dtype) for x in (pool.k, pool.v)]
    for copy, x in zip(copies, (pool.k, pool.v), strict=True):
        copy.view(torch.uint8).copy_(x.view(torch.uint8))
    return KVPool(*copies, pool.k_scale, pool.v_scale)


@pytest.fixture
def check(oracle, device, guarded):
    """Compare one call with the oracle, sequence by sequence; the pool must stay as it is."""

    def compare(paged, *, heads, q_dtype, sinks=False, scales=(1.0, 1.0), **options):
        rng = torch.Generator().manual_seed(7)
        dim = paged.pool.k.shape[-1]
        q = torch.randn(sum(paged.query_lens), heads, dim, generator=rng).to(q_dtype)
        logits = torch.randn(heads, generator=rng) if sinks else None
        batch, pool = on(paged, device)
        pool = guarded_pool(KVPool(pool.k, pool.v, *scales), guarded)
        before = pool.k.view(torch.uint8).clone(), pool.v.view(torch.uint8).clone()
        out = paged_attention(
            q.to(device), pool, batch, scale=dim**-0.5,
            sinks=None if logits is None else logits.to(device), **options,
        ).cpu()  # fmt: skip
        assert (out.shape, out.dtype) == (q.shape, q_dtype)
        assert torch.equal(pool.k.view(torch.uint8), before[0])
        assert torch.equal(pool.v.view(torch.uint8), before[1])
        start = 0
        for s, query_len in enumerate(paged.query_lens):
            rows = slice(start, start + query_len)
            expected = oracle.attention(
                q[rows].double().numpy(),
                paged.keys[s].double().numpy() * scales[0],
                paged.values[s].double().numpy() * scales[1],
                len(paged.keys[s]),
                scale=dim**-0.5,
                sinks=logits.double().numpy() if sinks else None,
                **options,
            )
            close = {"rtol": TOLERANCE[q_dtype], "atol": TOLERANCE[q_dtype]}
            np.testing.assert_allclose(out[rows].double().numpy(), expected, **close)
            start += query_len

    return compare


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_mixed_batch_equals_the_oracle(make_paged, check, variant):
    paged = make_paged(*MIXED, dim=16, kv_heads=1)
    check(paged, heads=2, q_dtype=torch.float32, **VARIANTS[variant])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (5, 1), (6, 1), (14, 2), (17, 1)])
def test_any_ratio_of_query_to_kv_heads(make_paged, check, heads, kv_heads):
    paged = make_paged([1, 6], [33, 30], kv_heads=kv_heads, dim=32)
    check(paged, heads=heads, q_dtype=torch.bfloat16)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_dim_in_the_tiles_of_every_generation(make_paged, check, arch, dim):
    with planning(TARGETS[arch]):
        paged = make_paged([1, 40], [150, 63], kv_heads=1, dim=dim, dtype=torch.bfloat16)
        check(paged, heads=2, q_dtype=torch.bfloat16)
        paged = make_paged([1], [123], kv_heads=1, dim=dim, dtype=torch.bfloat16)
        check(paged, heads=2, q_dtype=torch.bfloat16)


@pytest.mark.parametrize("block_size", [1, 8, 24, 64])
def test_any_block_size(make_paged, check, block_size):
    paged = make_paged([1, 3], [24, 33], kv_heads=1, dim=20, block_size=block_size)
    check(paged, heads=4, q_dtype=torch.float32)


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_pair_of_query_and_kv_dtype(make_paged, check, q_dtype, kv_dtype):
    check(make_paged([1, 5], [33, 20], kv_heads=1, dtype=kv_dtype), heads=3, q_dtype=q_dtype)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("lens", [([1], [63]), ([1, 9], [63, 40])], ids=str)
def test_fp8_kv_is_read_as_code_times_scale(make_paged, check, arch, lens):
    with planning(TARGETS[arch]):
        paged = make_paged(*lens, kv_heads=2, dim=32, dtype=FP8)
        check(paged, heads=6, q_dtype=torch.bfloat16, scales=(0.25, 3.0))


@pytest.mark.parametrize("length", [1, 63, 123, 1000])
def test_one_decode_alone_at_odd_lengths(make_paged, check, length):
    check(make_paged([1], [length], kv_heads=1), heads=3, q_dtype=torch.bfloat16)


@pytest.mark.parametrize("length", [1, 63, 123])
def test_one_whole_prompt_alone_at_odd_lengths(make_paged, check, length):
    paged = make_paged([length], [length], dim=16, kv_heads=1, dtype=torch.bfloat16)
    check(paged, heads=3, q_dtype=torch.bfloat16)


@pytest.mark.parametrize("variant", ["plain", "sinks", "softcap"])
@pytest.mark.parametrize("splits", [2, 8])
def test_keys_split_among_programs_give_the_same(make_paged, check, monkeypatch, splits, variant):
    """With more splits than tiles of keys some have nothing to do."""
    monkeypatch.setattr(gpu, "pick_splits", lambda *_: splits)
    paged = make_paged([1, 2], [123, 63], kv_heads=1, dim=32)
    check(paged, heads=3, q_dtype=torch.float32, **VARIANTS[variant])


def test_a_window_is_split_too(make_paged, check, monkeypatch):
    monkeypatch.setattr(gpu, "pick_splits", lambda *_: 4)
    paged = make_paged([1, 1], [123, 40], kv_heads=1, dim=32)
    check(paged, heads=3, q_dtype=torch.float32, **LIMITS)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("padding", ["decodes", "chunks"])
def test_padding_gives_zeros_and_reads_no_block(make_paged, device, monkeypatch, padding, splits):
    """As a CUDA graph pads: more sequences and rows than there are, their lengths 0, tables 0."""
    monkeypatch.setattr(gpu, "pick_splits", lambda *_: splits)
    lens = [1, 1] if padding == "decodes" else [1, 6]
    paged = make_paged(lens, [20, 33], kv_heads=1, dim=32)
    batch, pool = on(paged, device)
    used, more = sum(lens), 3
    padded = dataclasses.replace(
        batch,
        query_starts=torch.cat([batch.query_starts, batch.query_starts[-1:].expand(more)]),
        kv_lens=torch.nn.functional.pad(batch.kv_lens, (0, more)),
        block_tables=torch.nn.functional.pad(batch.block_tables, (0, 0, 0, more)),
    )
    q = torch.randn(used + more, 3, 32, device=device)
    q[used:] = torch.nan
    sinks = torch.randn(3, device=device)
    for options in ({"window": 4}, {"sinks": sinks})[: 3 - splits]:
        out = paged_attention(q, pool, padded, scale=0.2, **options)
        assert torch.equal(out[used:], torch.zeros_like(out[used:]))
        alone = reference(q[:used], pool, batch, scale=0.2, **options)
        assert torch.allclose(out[:used], alone, rtol=2e-5, atol=2e-5)
        same = reference(q, pool, padded, scale=0.2, **options)
        assert torch.allclose(out, same, rtol=2e-5, atol=2e-5)


def test_padding_rows_that_are_sequences_without_keys_give_zeros(make_paged, device):
    paged = make_paged([1, 1, 1], [20, 0, 3], kv_heads=1, dim=32)
    batch, pool = on(paged, device)
    out = paged_attention(torch.randn(3, 3, 32, device=device), pool, batch, scale=0.125)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out.isfinite().all()


def test_nan_stays_in_its_own_sequence(make_paged, device):
    paged = make_paged([1, 4, 1], [20, 10, 30], kv_heads=1, dim=32)
    batch, pool = on(paged, device)
    q = torch.randn(6, 3, 32, device=device)
    clean = paged_attention(q, pool, batch, scale=0.2)
    q[2] = torch.nan
    out = paged_attention(q, pool, batch, scale=0.2)
    assert out[2].isnan().all()
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(out[rest], clean[rest])


def test_query_rows_may_be_a_view_into_a_fused_projection(make_paged, device):
    paged = make_paged([1, 5], [70, 9], kv_heads=1, dim=32)
    batch, pool = on(paged, device)
    fused = torch.randn(6, 3 * 32 + 100, device=device)
    view = fused[:, 4 : 4 + 3 * 32].view(6, 3, 32)
    strided = paged_attention(view, pool, batch, scale=0.125)
    packed = paged_attention(view.contiguous(), pool, batch, scale=0.125)
    assert torch.equal(strided, packed)


def test_a_pool_may_be_a_layer_of_a_larger_one(make_paged, device):
    paged = make_paged([1, 5], [70, 9], kv_heads=2, dim=32)
    batch, pool = on(paged, device)
    both = torch.stack([pool.k, pool.v], dim=1)
    q = torch.randn(6, 4, 32, device=device)
    strided = paged_attention(q, KVPool(both[:, 0], both[:, 1]), batch, scale=0.125)
    assert torch.equal(strided, paged_attention(q, pool, batch, scale=0.125))


def plan(query_lens, max_kv_len, kv_heads=8, arch=90):
    """What one step launches."""
    S, T = len(query_lens), sum(query_lens)
    meta = {"dtype": torch.int32, "device": "meta"}
    batch = AttentionBatch(
        query_starts=torch.empty(S + 1, **meta), kv_lens=torch.empty(S, **meta),
        block_tables=torch.empty(S, 512, **meta), slots=torch.empty(T, **meta),
        positions=torch.empty(T, **meta), num_decodes=query_lens.count(1),
        max_query_len=max(query_lens), max_kv_len=max_kv_len,
    )  # fmt: skip
    pool = torch.empty(9, kv_heads, 16, 128, dtype=torch.bfloat16, device="meta")
    q = torch.empty(T, 4 * kv_heads, 128, dtype=torch.bfloat16, device="meta")
    with recording(TARGETS[arch]) as launches:
        paged_attention(q, KVPool(pool, pool), batch, scale=1.0)
    return launches


def test_small_batches_of_long_contexts_are_split_and_joined():
    alone = plan([1], 8192)
    assert [launch.name for launch in alone] == ["_attention", "join_parts"]
    assert alone[0].grid == (1, 8, 32)
    assert len(plan([1] * 64, 8192)) == 1  # 512 programs keep 132 processors busy
    assert len(plan([1], 200)) == 1
    assert len(plan([8192], 8192)) == 1


def test_the_launch_depends_on_nothing_that_a_captured_graph_could_not_keep():
    """It is made from meta tensors, which have no values; and few binaries serve all sizes."""
    assert plan([1] * 8, 4096)[0].grid == (8, 8, 4)
    assert plan([1] * 8, 4096)[0].key() == plan([1] * 15, 4096)[0].key()
    assert plan([600], 600)[0].key() == plan([1, 1, 800], 800)[0].key()


@pytest.mark.parametrize(("chunk", "height"), [(40, 64), (256, 64), (380, 64), (500, 128)])
def test_steps_of_few_tokens_take_smaller_tiles_whatever_their_longest_chunk(chunk, height):
    """Of 128 rows there would be fewer programs than multiprocessors, and decodes would fill 4."""
    assert plan([1] * 128 + [chunk], 8192)[0].constants["TILE_M"] == height


def test_keys_are_split_among_small_tiles_only():
    """The split form of the large ones does not fit into registers."""
    for kv_heads in (1, 2, 8, 32):
        for tokens in range(2, 6000, 97):
            launch = plan([tokens], 1 << 17, kv_heads=kv_heads)[0]
            assert launch.grid[2] == 1 or launch.constants["TILE_M"] <= 64


def test_a_tile_holds_the_heads_of_at_least_one_token():
    for group in range(1, 65):
        for length in (1, 2, 7, 300):
            for dim in (64, 80, 256):
                dtypes = torch.bfloat16, torch.bfloat16
                tiles = gpu.pick_tiles(TARGETS[90], *dtypes, dim, group, length, 8 * group * length)
                assert tiles.m >= group
                assert tiles.m & (tiles.m - 1) == 0
