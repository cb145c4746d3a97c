"""Every family, on every way through the engine, has transformers' probabilities.

whole, chunks of 1, 3 and 16, decode, prefix hit, preempted: the logprobs of the output are compared
with transformers' over the same tokens, in fp32, within 1e-4.
"""

import random

import pytest
import torch

from tokenfleet.engine import Engine, EngineConfig, SamplingParams

FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "smollm3", "gemma2",
    "gemma3_text", "phi3", "olmo2", "olmo3", "granite",
]  # fmt: skip
WAYS = {
    "whole": {},
    "chunks of 1": {"max_chunk_tokens": 1},
    "chunks of 3": {"max_chunk_tokens": 3},
    "chunks of 16": {"max_chunk_tokens": 16},
    "prefix hit": {},
    "preempted": {"num_blocks": 9, "max_num_seqs": 3},
}


def test_no_family_is_forgotten(families):
    assert sorted(FAMILIES) == sorted(families)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_are_transformers(family, way, tiny_random, reference):
    path = tiny_random(family)
    settings = {"max_num_seqs": 4, "block_size": 8, "num_blocks": 64, **WAYS[way]}
    engine = Engine(EngineConfig(path, dtype="float32", device="cpu", **settings))
    rng = random.Random(5)
    prompts = [[rng.randrange(250) for _ in range(length)] for length in (29, 17, 24)]
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=3, ignore_eos=True)
    if way == "prefix hit":
        engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
    outputs = engine.generate(prompts, params)
    engine.audit()
    if way == "prefix hit":
        assert engine.stats.cache_hits_total >= 48
    if way == "preempted":
        assert engine.stats.preemptions_total > 0
    model = reference(path)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0]
        wanted = logits[len(prompt) - 1 : -1].log_softmax(-1)
        for report, row in zip(output.logprobs, wanted, strict=True):
            assert report == pytest.approx({t: row[t].item() for t in report}, abs=1e-4)
            assert max(report, key=report.get) == int(row.argmax())
