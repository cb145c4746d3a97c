"""Paged attention against the float64 oracle, over pools whose unowned positions are NaN."""

import numpy as np
import pytest
import torch

from tokenfleet.kernels import backend as backend_module
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool, paged_attention, reference

pytestmark = pytest.mark.usefixtures("backend")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
INT8 = 1e-4  # over int8 KV with fp32 queries: two bytes hold a query's values and the weights
MIXED = ([1, 1, 1, 1, 5, 63, 1, 17], [1, 63, 123, 1000, 5, 123, 40, 200])
VARIANTS = {
    "plain": {},
    "window": {"window": 16},
    "window of one": {"window": 1},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "all": {"window": 50, "softcap": 20.0, "sinks": True},
}


def check(paged, oracle, *, heads, q_dtype, sinks=False, rtol=None, **options):
    """Compare one call with the oracle, sequence by sequence."""
    rng = torch.Generator().manual_seed(7)
    dim = paged.pool.k.shape[-1]
    q = torch.randn(sum(paged.query_lens), heads, dim, generator=rng).to(q_dtype)
    logits = torch.randn(heads, generator=rng) if sinks else None
    before = paged.pool.k.clone(), paged.pool.v.clone()
    out = paged_attention(q, paged.pool, paged.batch, scale=dim**-0.5, sinks=logits, **options)
    assert out.shape == q.shape
    assert out.dtype == q_dtype
    assert torch.equal(paged.pool.k.nan_to_num(9e4), before[0].nan_to_num(9e4))
    assert torch.equal(paged.pool.v.nan_to_num(9e4), before[1].nan_to_num(9e4))
    start = 0
    for s, query_len in enumerate(paged.query_lens):
        expected = oracle.attention(
            q[start : start + query_len].double().numpy(),
            paged.keys[s].double().numpy(),
            paged.values[s].double().numpy(),
            len(paged.keys[s]),
            scale=dim**-0.5,
            sinks=logits.double().numpy() if sinks else None,
            **options,
        )
        got = out[start : start + query_len].double().numpy()
        tolerance = max(TOLERANCE[q_dtype], TOLERANCE[paged.pool.k.dtype] if rtol is None else rtol)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
        start += query_len


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_mixed_batch_equals_the_oracle(make_paged, oracle, variant, dtype):
    paged = make_paged(*MIXED, dtype=dtype)
    check(paged, oracle, heads=9, q_dtype=dtype, **VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_over_int8_kv_a_mixed_batch_equals_the_oracle(make_paged, oracle, variant):
    paged = make_paged(*MIXED, dtype=torch.int8)
    check(paged, oracle, heads=9, q_dtype=torch.float32, rtol=INT8, **VARIANTS[variant])


@pytest.mark.parametrize("dim", [16, 20, 48, 64, 80, 96, 128, 144, 256, 272])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1), (4, 1), (9, 1)])
def test_over_int8_kv_any_head_dim_and_group(make_paged, oracle, dim, heads, kv_heads):
    paged = make_paged([1, 1, 3], [50, 131, 65], kv_heads=kv_heads, dim=dim, dtype=torch.int8)
    check(paged, oracle, heads=heads, q_dtype=torch.float32, rtol=INT8)


@pytest.mark.parametrize("dim", [64, 192])
@pytest.mark.parametrize("block_size", [8, 24, 32, 64])
def test_over_int8_kv_any_block_size_and_split(make_paged, oracle, block_size, dim):
    paged = make_paged([1, 1, 1], [1100, 512, 77], dim=dim, block_size=block_size, dtype=torch.int8)
    for window in (None, 531):
        check(paged, oracle, heads=6, q_dtype=torch.float32, rtol=INT8, window=window)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 63, 129])
def test_over_int8_kv_far_weights_count_beside_near_ones(make_paged, oracle, length):
    # the values of tokens with small weights are large: what a weight's second byte is for
    paged = make_paged([1], [length], dtype=torch.int8)
    far = torch.arange(length) % 3 == 1
    block = paged.batch.block_tables[0][torch.arange(length) // 16].long()
    paged.pool.v_scales[block[far], :, (torch.arange(length) % 16)[far]] *= 300.0
    paged.values[0][far] *= 300.0
    check(paged, oracle, heads=9, q_dtype=torch.float32, rtol=5e-3)


@pytest.mark.parametrize("poisoned", ["k_scales", "v_scales"])
def test_over_int8_kv_what_is_no_number_stays_in_its_sequence(make_paged, poisoned):
    paged = make_paged([1, 1, 9], [40, 41, 30], dtype=torch.int8)
    for s in (0, 2):
        getattr(paged.pool, poisoned)[paged.batch.block_tables[s, 0], :, 3] = torch.nan
    out = paged_attention(torch.randn(11, 9, 64), paged.pool, paged.batch, scale=0.125)
    assert out[[0, *range(2, 11)]].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (8, 1), (14, 2), (32, 2)])
def test_any_ratio_of_query_to_kv_heads(make_paged, oracle, heads, kv_heads):
    paged = make_paged([1, 1, 7], [33, 1, 30], kv_heads=kv_heads, dim=32)
    check(paged, oracle, heads=heads, q_dtype=torch.float32)


@pytest.mark.parametrize("dim", [8, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 24])
def test_any_head_dim_and_block_size(make_paged, oracle, dim, block_size):
    paged = make_paged([1, 1, 3], [50, 24, 65], kv_heads=2, dim=dim, block_size=block_size)
    check(paged, oracle, heads=4, q_dtype=torch.float32)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_chunks_in_bf16_of_any_head_dim(make_paged, oracle, dim, kv_heads):
    paged = make_paged([2, 70], [66, 100], kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16)
    check(paged, oracle, heads=3, q_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "kv_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str
)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_pair_of_query_and_kv_dtype(make_paged, oracle, q_dtype, kv_dtype):
    paged = make_paged([1, 1, 1, 19], [1, 63, 300, 123], dtype=kv_dtype)
    # the oracle reads the rounded KV too, so only the query's own rounding is left
    close = TOLERANCE[q_dtype] if kv_dtype != torch.int8 else max(INT8, TOLERANCE[q_dtype])
    check(paged, oracle, heads=9, q_dtype=q_dtype, rtol=close)


@pytest.mark.parametrize("length", [1, 63, 123, 1000])
def test_one_decode_alone_at_odd_lengths(make_paged, oracle, length):
    check(make_paged([1], [length]), oracle, heads=9, q_dtype=torch.float32)


@pytest.mark.parametrize("length", [1, 63, 123])
def test_one_whole_prompt_alone_at_odd_lengths(make_paged, oracle, length):
    check(make_paged([length], [length], dim=16), oracle, heads=3, q_dtype=torch.float32)


def test_padding_row_with_no_tokens_gives_zeros_and_reads_no_block(make_paged):
    paged = make_paged([1, 1, 1], [20, 0, 3])
    out = paged_attention(torch.randn(3, 9, 64), paged.pool, paged.batch, scale=0.125)
    assert torch.equal(out[1], torch.zeros(9, 64))
    assert out.isfinite().all()


def test_a_sequence_does_not_depend_on_its_neighbours(make_paged):
    paged = make_paged([1, 1, 1, 1], [100, 100, 7, 641])
    q = torch.randn(4, 9, 64)
    together = paged_attention(q, paged.pool, paged.batch, scale=0.125)
    scrambled = KVPool(paged.pool.k.clone(), paged.pool.v.clone())
    for s in (0, 2, 3):
        blocks = paged.batch.block_tables[s].unique().long()
        scrambled.k[blocks], scrambled.v[blocks] = 3.0, -3.0
    again = paged_attention(q, scrambled, paged.batch, scale=0.125)
    assert torch.equal(together[1], again[1])
    assert not torch.equal(together[3], again[3])


def test_query_rows_may_be_a_view_into_a_fused_projection(make_paged):
    paged = make_paged([1, 1, 5], [10, 70, 9])
    fused = torch.randn(7, 9 * 64 + 100)
    view = fused[:, : 9 * 64].view(7, 9, 64)
    strided = paged_attention(view, paged.pool, paged.batch, scale=0.125)
    packed = paged_attention(view.contiguous(), paged.pool, paged.batch, scale=0.125)
    assert torch.equal(strided, packed)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)],
    ids=str,
)
def test_compiled_result_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    make_paged, dtype, kv_dtype
):
    lens = [1, 1, 1, 70, 9], [300, 1, 641, 200, 9]
    paged, threads = make_paged(*lens, dtype=kv_dtype or dtype), torch.get_num_threads()
    q = torch.randn(sum(lens[0]), 9, 64).to(dtype)
    with backend_module.using("cpp"):
        try:
            torch.set_num_threads(2)
            whole = paged_attention(q, paged.pool, paged.batch, scale=0.125)
            torch.set_num_threads(1)
            assert torch.equal(paged_attention(q, paged.pool, paged.batch, scale=0.125), whole)
        finally:
            torch.set_num_threads(threads)
        for s, row in ((2, slice(2, 3)), (3, slice(3, 73))):
            alone = AttentionBatch(
                query_starts=torch.tensor([0, lens[0][s]], dtype=torch.int32),
                kv_lens=paged.batch.kv_lens[s : s + 1],
                block_tables=paged.batch.block_tables[s : s + 1],
                slots=paged.batch.slots[row],
                positions=paged.batch.positions[row],
                num_decodes=int(lens[0][s] == 1),
                max_query_len=lens[0][s],
                max_kv_len=lens[1][s],
            )
            assert torch.equal(paged_attention(q[row], paged.pool, alone, scale=0.125), whole[row])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 20.0}], ids=["plain", "window"])
def test_however_a_prompt_is_cut_its_rows_have_the_same_bits(make_paged, dtype, kv_dtype, options):
    paged = make_paged([300], [310], dtype=kv_dtype or dtype)
    q = torch.randn(300, 9, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with backend_module.using("cpp"):
        whole = paged_attention(q, paged.pool, paged.batch, scale=0.125, **options)
        for begin, end in ((0, 90), (90, 300), (37, 39)):
            chunk = AttentionBatch(
                query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
                kv_lens=torch.tensor([10 + end], dtype=torch.int32),
                block_tables=paged.batch.block_tables,
                slots=paged.batch.slots[begin:end],
                positions=paged.batch.positions[begin:end],
                num_decodes=0,
                max_query_len=end - begin,
                max_kv_len=10 + end,
            )
            part = paged_attention(q[begin:end], paged.pool, chunk, scale=0.125, **options)
            assert torch.equal(part, whole[begin:end])
    expected = reference(q, paged.pool, paged.batch, scale=0.125, **options)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(whole, expected, **close)
