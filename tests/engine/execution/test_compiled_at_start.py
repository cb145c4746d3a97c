"""Whatever an engine on a GPU serves, its kernels were compiled while it started.

A kernel that is compiled in the middle of a stream stops everybody for seconds. Tensors have no
data here: what is launched is written down, and every sampled token is the same one.
"""

import random
from itertools import count

import numpy as np
import pytest
import torch

from tokenfleet.engine import EngineConfig, EngineCore, EngineRequest, SamplingParams
from tokenfleet.engine.execution import placed_model
from tokenfleet.engine.execution.loading import LoadedModel, buckets_for
from tokenfleet.engine.execution.profiling import run_largest_step, run_other_steps
from tokenfleet.engine.execution.runner import Runner
from tokenfleet.kernels import backend
from tokenfleet.kernels.fp8 import FP8

pytest.importorskip("triton", reason="the launches are those of Triton kernels")

DEVICE, TOKEN = torch.device("meta"), 5
SLOTS, BUDGET, MAX_LEN, BLOCK_SIZE, BLOCKS = 5, 200, 256, 16, 90


class BlankTransfers:
    """Tensors of the right shape on their way there, the same token on the way back."""

    def send(self, array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)

    def refill(self, tensor, array):
        assert tensor.numel() == array.size

    def fetch(self, tensors):
        return lambda: [torch.full(x.shape, TOKEN, dtype=x.dtype) for x in tensors]


def run_once(work):
    """A capture that keeps nothing."""
    work()
    return work


def started(decoder, *, eager):
    """A core over a decoder without data, after all that a start runs."""
    config = EngineConfig(
        ".", max_num_seqs=SLOTS, max_num_batched_tokens=BUDGET, enforce_eager=eager
    )
    run_largest_step(decoder, config, BLOCK_SIZE, MAX_LEN)
    run_other_steps(decoder, config, BLOCK_SIZE, MAX_LEN)
    model = placed_model.PlacedModel(
        decoder, num_slots=SLOTS, num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_len=MAX_LEN,
        known_tokens=range(decoder.spec.vocab_size - 2), device=DEVICE, ahead=True,
        capture=None if eager else run_once, buckets=[] if eager else buckets_for(config, decoder),
    )  # fmt: skip
    loaded = LoadedModel(decoder.spec, Runner(model), MAX_LEN, BLOCK_SIZE, BLOCKS, overlap=True)
    return EngineCore(config, load=lambda *_: loaded)


WISHES = [
    {}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"top_k": 3, "temperature": 0.5},
    {"presence_penalty": 0.5}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"logit_bias": {7: 1.0}},
    {"n": 3, "temperature": 1.0}, {"min_tokens": 2}, {"logprobs": 1, "logprobs_mode": "processed"},
]  # fmt: skip


def some_requests(dice, ids, number):
    for _ in range(number):
        length = dice.choice([1, 2, 3, 9, 17, 33, 64, 190, 240])
        params = SamplingParams(max_tokens=6, ignore_eos=True, **dice.choice(WISHES))
        yield EngineRequest(str(next(ids)), [7 + i % 90 for i in range(length)], params)


def served(core, seed):
    """Bursts of requests of every kind: alone, few and many at once."""
    dice, ids = random.Random(seed), count()
    for number in (1, 1, 1, 2, 4, 12, 12, 12):
        for request in some_requests(dice, ids, number):
            core.add(request)
        while core.has_work:
            assert [event.error for event in core.step() if event.error] == []


@pytest.mark.parametrize(
    ("family", "quantization", "kv_dtype", "eager"),
    [
        ("llama", None, None, False),
        ("llama", None, None, True),
        ("qwen3", "fp8", FP8, False),
        ("gemma3_text", None, None, False),
    ],
    ids=["llama", "eager", "fp8", "windows"],
)
def test_every_kernel_that_serves_was_compiled_at_the_start(
    family, quantization, kv_dtype, eager, blank_decoder, monkeypatch
):
    from tokenfleet.kernels.gpu.launch import TARGETS, recording

    monkeypatch.setattr(placed_model, "transfers_for", lambda _device: BlankTransfers())
    with (
        backend.using("reference"),
        torch.inference_mode(),
        recording(TARGETS[90]) as launches,
    ):
        core = started(blank_decoder(family, quantization, kv_dtype), eager=eager)
        compiled = {launch.key() for launch in launches}
        launches.clear()
        served(core, seed=0)
    late = {launch.key(): launch for launch in launches if launch.key() not in compiled}
    assert [(launch.name, launch.constants) for launch in late.values()] == []
    assert {"_attention", "_copy", "_draw"} <= {launch.name for launch in launches}
