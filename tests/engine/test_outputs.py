"""The engine's tokens are the model's, whatever else runs; transformers is the reference."""

import random

import pytest
import torch

from tokenfleet.engine import Engine, EngineConfig, SamplingParams

FIVE = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def make_engine(path, **changes):
    defaults = {"max_num_seqs": 9, "max_num_batched_tokens": 64, "block_size": 8, "num_blocks": 200}
    return Engine(EngineConfig(path, dtype="float32", device="cpu", **{**defaults, **changes}))


def reference_tokens(path, prompts, max_tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(max_tokens):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def some_prompts(count, seed=0, longest=40):
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def run_with_arrivals(engine, prompts, params, rng):
    """Add prompts at random steps; audit after every step; token ids by prompt index."""
    waiting = list(enumerate(prompts))
    outputs = {i: [] for i, _ in waiting}
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.5:
            index, prompt = waiting.pop(0)
            engine.add(str(index), prompt, params)
        for event in engine.step():
            outputs[int(event.id)] += event.token_ids
        engine.audit()
    return [outputs[i] for i in range(len(prompts))]


MIXED = some_prompts(9, seed=1) + some_prompts(2, seed=1)
"""Two of them stand there twice."""
SAMPLED = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def each_alone(tiny_random):
    """The tokens of each prompt of MIXED, run in an engine of its own: greedy, and sampled."""
    path = tiny_random("llama")
    return [
        [make_engine(path).generate([prompt], params)[0].token_ids for prompt in MIXED]
        for params in (GREEDY, SAMPLED)
    ]


@pytest.mark.parametrize("family", FIVE)
def test_greedy_tokens_are_transformers_in_any_batch_and_arrival_order(family, tiny_random):
    path = tiny_random(family)
    prompts = some_prompts(9)
    expected = reference_tokens(path, prompts, GREEDY.max_tokens)
    engine = make_engine(path)
    for count in range(1, 10):
        got = run_with_arrivals(engine, prompts[:count], GREEDY, random.Random(count))
        assert got == expected[:count]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 9},
        {"max_chunk_tokens": 1},
        {"max_chunk_tokens": 3},
        {"max_chunk_tokens": 7},
        {"max_chunk_tokens": 9},
        {"block_size": 1, "num_blocks": 600},
        {"block_size": 64},
        {"prefix_cache": False},
        {"num_blocks": 9, "max_num_seqs": 4},
        {"num_blocks": 12},
        {"overlap": True, "max_chunk_tokens": 7},
        {"overlap": True, "num_blocks": 9, "max_num_seqs": 4},
    ],
    ids=str,
)
def test_output_does_not_depend_on_chunks_blocks_cache_or_preemption(
    changes, tiny_random, each_alone
):
    path = tiny_random("llama")
    for params, alone in zip((GREEDY, SAMPLED), each_alone, strict=True):
        engine = make_engine(path, **changes)
        assert run_with_arrivals(engine, MIXED, params, random.Random(3)) == alone
    if changes.get("num_blocks", 99) < 20:
        assert engine.stats.preemptions_total > 0


def test_logprobs_do_not_depend_on_the_batch(tiny_random):
    path = tiny_random("qwen3")
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
    prompts = some_prompts(5, seed=2)
    together = make_engine(path).generate(prompts, params)
    for prompt, output in zip(prompts, together, strict=True):
        alone = make_engine(path, prefix_cache=False).generate([prompt], params)[0]
        assert alone.token_ids == output.token_ids
        for a, b in zip(alone.logprobs, output.logprobs, strict=True):
            assert a == pytest.approx(b, abs=1e-4)


def test_logprobs_are_transformers_for_output_and_prompt(tiny_random):
    from transformers import AutoModelForCausalLM

    path = tiny_random("llama")
    prompt = some_prompts(1, seed=4, longest=90)[0] * 3
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=5, prompt_logprobs=2)
    output = make_engine(path, max_chunk_tokens=5).generate([prompt], params)[0]
    ids = torch.tensor([prompt + output.token_ids])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(ids).logits[0].log_softmax(-1)
    for i, report in enumerate(output.logprobs):
        row = wanted[len(prompt) - 1 + i]
        assert report == pytest.approx({t: row[t].item() for t in report}, abs=1e-4)
        assert set(row.topk(5).indices.tolist()) <= set(report)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, report in enumerate(output.prompt_logprobs[1:], 1):
        assert report == pytest.approx({t: wanted[i - 1][t].item() for t in report}, abs=1e-4)
        assert prompt[i] in report


def test_samples_of_one_seed_differ_and_each_is_reproducible(tiny_random):
    path = tiny_random("llama")
    params = SamplingParams(max_tokens=12, n=4, seed=9, ignore_eos=True)
    engine = make_engine(path)
    first = engine.generate([[1, 2, 3]], params)[0]
    outputs = [tuple(choice.token_ids) for choice in first.choices]
    assert len(set(outputs)) == 4
    busy = engine.generate([[5] * 30, [1, 2, 3], [6] * 20], params)[1]
    assert [tuple(choice.token_ids) for choice in busy.choices] == outputs


def test_a_resumed_output_goes_on_as_if_never_interrupted(tiny_random):
    path = tiny_random("llama")
    prompt = [7, 8, 9]
    params = SamplingParams(max_tokens=16, n=3, seed=2, temperature=0.9, top_k=40, ignore_eos=True,
                            presence_penalty=0.5, repetition_penalty=1.2)  # fmt: skip
    whole = [c.token_ids for c in make_engine(path).generate([prompt], params)[0].choices]
    elsewhere = make_engine(path, block_size=4)
    resume = (tuple(whole[0][:5]), tuple(whole[1][:11]), ())
    elsewhere.add("again", prompt, params, resume=resume)
    got = [list(part) for part in resume]
    while elsewhere.has_work:
        for event in elsewhere.step():
            got[event.choice] += event.token_ids
    assert got == whole


def test_lengths_end_exactly(tiny_random):
    path = tiny_random("llama")
    engine = make_engine(path, max_model_len=32)
    for tokens, expected in ((0, 0), (1, 1), (5, 5), (None, 22)):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        output = engine.generate([[1] * 10], params)[0]
        assert (len(output.token_ids), output.finish_reason) == (expected, "length")
    for length, expected in ((31, 1), (32, 0)):
        params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
        output = engine.generate([[1] * length], params)[0]
        assert (len(output.token_ids), output.finish_reason) == (expected, "length")
    bad, good = engine.generate([[1] * 33, [1] * 3], SamplingParams(max_tokens=2, temperature=0))
    assert bad.finish_reason == "error"
    assert "33 tokens" in bad.error
    assert good.finish_reason in ("length", "stop")


def test_prompt_logprobs_come_without_any_output(tiny_random):
    engine = make_engine(tiny_random("llama"))
    output = engine.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert output.token_ids == []
    assert output.finish_reason == "length"
    assert [len(report) for report in output.prompt_logprobs[1:]] == [1, 1, 1]


def test_every_eos_of_the_list_stops_and_stop_ids_survive_ignore_eos(script_model):
    chain = [10, 11, 12, 13, 14]
    engine = make_engine(script_model(chain))
    eos = engine.core.spec.eos_token_ids[0]
    whole = SamplingParams(max_tokens=20, temperature=0.0)
    output = engine.generate([[0]], whole)[0]
    assert (output.token_ids, output.finish_reason) == ([*chain, eos], "stop")
    ids = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, stop_token_ids=[12])
    output = engine.generate([[0]], ids)[0]
    assert (output.token_ids, output.finish_reason) == ([10, 11, 12], "stop")
    late = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=[11], min_tokens=4)
    output = engine.generate([[0]], late)[0]
    assert output.finish_reason == "stop"
    assert 11 not in output.token_ids[:4]
    assert len(output.token_ids) > 4


def test_forked_requests_share_blocks_and_go_on_alone(tiny_random):
    engine = make_engine(tiny_random("llama"))
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    engine.add("trunk", [3] * 40, params)
    trunk = []
    for _ in range(4):
        trunk += [t for event in engine.step() for t in event.token_ids]
    engine.fork("trunk", "twin")
    outputs = {"trunk": list(trunk), "twin": []}
    for event in engine.step():
        outputs[event.id] += event.token_ids
    assert engine.stats.running == 2
    assert engine.core.scheduler.pool.num_used <= 8
    while engine.has_work:
        for event in engine.step():
            outputs[event.id] += event.token_ids
        engine.audit()
    assert outputs["twin"][:6] == outputs["trunk"][4:]
