"""What an engine keeps narrow: a cache in FP8 or int8, and weights in FP8."""

from dataclasses import replace

import pytest
import torch

from tokenfleet.engine import Engine, EngineConfig, SamplingParams
from tokenfleet.kernels import fp8
from tokenfleet.kernels.backend import using

PROMPT = torch.randint(0, 256, (29,), generator=torch.Generator().manual_seed(9)).tolist()


def over(scales, run):
    """The run, its cache over these scales."""
    run.pools = [replace(pool, k_scale=scales[0], v_scale=scales[1]) for pool in run.pools]
    return run


@pytest.mark.parametrize("chunk", [1, 16, 29])
def test_a_cache_in_fp8_stays_near_the_wide_one_and_takes_a_quarter(tiny_random, driver, chunk):
    path = tiny_random("llama")
    wide, narrow = driver(path), driver(path, kv_dtype=fp8.FP8)
    exact = wide.prefill(PROMPT, chunk)
    error = (narrow.prefill(PROMPT, chunk) - exact).norm() / exact.norm()
    assert 0.001 < error < 0.1
    assert narrow.pools[0].k.dtype == torch.float8_e4m3fn
    sizes = [run.decoder.kv_bytes_per_block(4) for run in (narrow, wide)]
    assert sizes[0] * 4 == sizes[1]
    assert sum(p.k.nbytes + p.v.nbytes for p in narrow.pools) == 64 * sizes[0]


@pytest.mark.parametrize("chunk", [1, 16, 29])
@pytest.mark.parametrize("kernels", ["cpp", "reference"])
def test_a_cache_in_int8_is_nearer_to_the_wide_one_than_fp8(tiny_random, driver, kernels, chunk):
    path = tiny_random("llama")
    with using(kernels):
        exact, in_fp8, run = (
            driver(path, kv_dtype=dtype) for dtype in (None, torch.float8_e4m3fn, torch.int8)
        )
        wide, coarse, narrow = (one.prefill(PROMPT, chunk) for one in (exact, in_fp8, run))
    error = (narrow - wide).norm() / wide.norm()
    assert 0.0005 < error < 0.5 * (coarse - wide).norm() / wide.norm()
    pool, size = run.pools[0], run.decoder.kv_bytes_per_block(4)
    assert pool.k.dtype == torch.int8
    held = [x.nbytes for p in run.pools for x in (p.k, p.v, p.k_scales, p.v_scales)]
    assert sum(held) == 64 * size
    assert size * 4 * pool.k.shape[3] == exact.decoder.kv_bytes_per_block(4) * (pool.k.shape[3] + 4)


def test_scales_of_the_cache_move_the_range_and_nothing_else(tiny_random, driver):
    def run(*scales):
        return over(scales, driver(tiny_random("llama"), kv_dtype=fp8.FP8)).prefill(PROMPT, 16)

    plain, by_two = run(2.0**-6, 2.0**-6), run(2.0**-5, 2.0**-7)  # powers of two round alike
    torch.testing.assert_close(by_two, plain, atol=0.03, rtol=0)  # but for the smallest
    cut = run(1e-4, 1e-4)  # nearly all lies beyond 448 x 1e-4
    assert cut.isfinite().all()
    assert (cut - plain).norm() > 0.3 * plain.norm()


@pytest.mark.parametrize("settings", [{"quantization": "fp8"}, {"quantization": "fp8_block"},
                                      {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}],
                         ids=str)  # fmt: skip
def test_a_narrow_engine_gives_the_same_text_alone_chunked_preempted_and_shared(
    tiny_random, settings
):
    def run(texts, **more):
        sizes = {"max_num_seqs": 4, "num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 64}
        config = EngineConfig(
            tiny_random("llama"), device="cpu", dtype="float32", **settings, **{**sizes, **more}
        )
        engine = Engine(config)
        outputs = engine.generate(texts, SamplingParams(max_tokens=12, seed=3, temperature=1.0))
        engine.audit()
        return [output.token_ids for output in outputs]

    texts = ["the quick brown fox", "jumps", "the quick brown fox jumps"]
    together = run(texts)
    assert together == [run([text], prefix_cache=False)[0] for text in texts]
    assert together == run(texts, max_num_batched_tokens=5, num_blocks=12)
