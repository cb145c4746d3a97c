"""Decode steps that are replayed as programs give the bits that single operations give."""

import pytest
import torch

from tokenfleet.engine import Engine, EngineConfig, SamplingParams
from tokenfleet.engine.execution import chunk_program
from tokenfleet.kernels import backend

PROMPTS = [list(range(3, 3 + count)) for count in (1, 30, 7, 18, 2, 55, 9)]
WIDTHS = {"hidden_size": 288, "intermediate_size": 96, "head_dim": 32}
"""Multiples of 32, which the compiled bf16 product wants."""
RECORDED = {"llama", "qwen3", "gemma2"}
"""The others scale, add or route with torch."""
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def cpp():
    with backend.using("cpp"):
        yield


def engine(path, **changes):
    settings = {
        "max_num_seqs": 6, "block_size": 4, "num_blocks": 70, "max_num_batched_tokens": 24,
        "dtype": "bfloat16", "device": "cpu",
    }  # fmt: skip
    return Engine(EngineConfig(path, **{**settings, **changes}))


def programs(running):
    return running.core.runner.model.programs


def seen(running, prompts=PROMPTS):
    """Everything that depends on a logit."""
    outputs = running.generate(prompts, PARAMS)
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite", "mixtral", "olmo2"])
def test_programs_change_no_bit_of_any_family(family, quantization, tiny_random):
    path = tiny_random(family, **(WIDTHS if family in RECORDED else {}))
    recorded = engine(path, quantization=quantization)
    assert seen(recorded) == seen(engine(path, quantization=quantization, enforce_eager=True))
    assert (len(programs(recorded).decodes) > 0) == (family in RECORDED)
    assert programs(recorded).chunks.recorded == (family in RECORDED)


def test_over_an_int8_cache_programs_and_shared_blocks_change_no_bit(tiny_random):
    path = tiny_random("llama", **WIDTHS)
    sampled = SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=5, ignore_eos=True)

    def run(**changes):
        running = engine(path, kv_cache_dtype="int8", **changes)
        # twice: the second time prompts begin in cached blocks; samples copy a prompt's last one
        texts = [[c.token_ids for o in running.generate(PROMPTS, sampled) for c in o.choices]
                 for _ in range(2)]  # fmt: skip
        running.audit()
        assert running.core.runner.model.pools[0].k.dtype == torch.int8
        return texts, programs(running)

    eager, _ = run(enforce_eager=True)
    recorded, made = run()
    assert recorded == eager
    assert len(made.decodes) > 0
    assert made.chunks.recorded


def test_decode_steps_of_a_llama_are_recorded_once_for_each_size(tiny_random):
    running = engine(tiny_random("llama", **WIDTHS))
    seen(running)
    sizes = len(programs(running).decodes)
    assert 1 <= sizes <= 6
    seen(running)
    assert len(programs(running).decodes) == sizes


def test_steps_with_more_rows_than_a_program_takes_are_computed_all_the_same(
    tiny_random, monkeypatch
):
    path = tiny_random("llama", **WIDTHS)
    expected = seen(engine(path, enforce_eager=True))
    monkeypatch.setattr(chunk_program, "MOST_ROWS", 16)
    running = engine(path)
    assert seen(running) == expected
    assert programs(running).chunks.recorded


def test_eager_means_that_nothing_is_recorded(tiny_random):
    assert programs(engine(tiny_random("llama", **WIDTHS), enforce_eager=True)) is None


def test_preempted_and_resumed_sequences_are_replayed_right(tiny_random):
    path = tiny_random("llama", **WIDTHS)
    tight = engine(path, num_blocks=34)  # not enough for all of them at once
    assert seen(tight) == seen(engine(path, num_blocks=34, enforce_eager=True))
    assert tight.stats.preemptions_total > 0


def test_after_sleep_programs_use_the_new_blocks(tiny_random):
    running = engine(tiny_random("llama", **WIDTHS))
    before = seen(running)
    old = programs(running)
    running.sleep()
    running.wake()
    assert programs(running) is not old
    assert seen(running) == before


def test_new_weights_are_those_that_programs_use(tiny_random):
    path = tiny_random("llama", **WIDTHS)
    running = engine(path)
    before = seen(running)
    flat = {
        name: tensor * 0.5 if "down_proj" in name else tensor
        for name, tensor in _weights(path).items()
    }
    running.update_weights(flat.items())
    after = seen(running)
    assert after != before
    running.update_weights(path)
    assert seen(running) == before


def test_other_kernels_chosen_later_are_recorded_anew_or_not_at_all(tiny_random):
    running = engine(tiny_random("llama", **WIDTHS), dtype="float32")
    before = seen(running)
    with backend.using("reference"):
        torch.testing.assert_close(
            [tokens for tokens, _ in seen(running)], [tokens for tokens, _ in before]
        )


def _weights(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")
