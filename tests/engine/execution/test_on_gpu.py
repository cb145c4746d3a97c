"""What the recorded captures stand for, with CUDA graphs. Runs where there is a CUDA device."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tokenfleet.engine import EngineConfig, EngineCore, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3},
]
PROMPTS = [[(9 * i + j) % 250 for j in range(2 + 3 * i)] for i in range(17)]
PARAMS = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True, **KINDS[i % 3]) for i in range(17)]


def start(path, **changes):
    settings = {
        "max_num_seqs": 17, "max_num_batched_tokens": 64, "num_blocks": 200, "max_model_len": 128,
        "dtype": "float32", "device": "cuda", "seed": 1, "gpu_memory_fraction": 0.5,
    }  # fmt: skip
    return EngineCore(EngineConfig(path, **{**settings, **changes}))


@pytest.fixture
def core_of(tiny_random):
    return partial(start, tiny_random("qwen3"))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 15, 16, 17])
def test_graphs_and_overlap_give_the_tokens_of_launched_steps(count, core_of, play):
    prompts, params = PROMPTS[:count], PARAMS[:count]
    expected = play(core_of(enforce_eager=True, overlap=False), prompts, params)
    for overlap in (False, True):
        core = core_of(overlap=overlap)
        assert core.runner.model.graphs is not None
        assert play(core, prompts, params) == expected
        assert play(core, prompts, params) == expected


def test_sleep_gives_weights_and_blocks_back_to_the_card(core_of, play):
    core = core_of()
    expected = play(core, PROMPTS, PARAMS)
    before = torch.cuda.memory_allocated()
    core.sleep()
    weights_and_blocks = 3 * 200 * 16 * 3 * 32 * 4 * 2  # layers, blocks, size, heads, dim, fp32
    assert torch.cuda.memory_allocated() <= before - weights_and_blocks
    core.wake()
    assert play(core, PROMPTS, PARAMS) == expected


def test_memory_is_constant_over_many_rounds(core_of, play):
    core, held = core_of(), []
    for _ in range(5):
        play(core, PROMPTS, PARAMS)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[1:2] * 4


def test_graphs_see_updated_weights(core_of, play, tiny_random):
    weights = load_file(tiny_random("qwen3") / "model.safetensors")
    core = core_of()
    expected = play(core, PROMPTS, PARAMS)
    shifted = {name: (t if "norm" in name else t.roll(1, 0)).cuda() for name, t in weights.items()}
    core.update_weights(shifted.items())
    assert play(core, PROMPTS, PARAMS) != expected
    core.update_weights(weights.items())
    assert play(core, PROMPTS, PARAMS) == expected
