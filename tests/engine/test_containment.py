"""What goes wrong in a step costs the job that caused it, and nothing else."""

import pytest
import torch

from tokenfleet.engine import (
    ConfigError,
    Engine,
    EngineConfig,
    InvalidRequest,
    SamplingParams,
)

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine(tiny_random):
    config = EngineConfig(
        tiny_random("llama"), max_num_seqs=4, max_num_batched_tokens=32, block_size=8,
        num_blocks=64, dtype="float32", device="cpu",
    )  # fmt: skip
    return Engine(config)


def run(engine, prompts, params=GREEDY):
    outputs = engine.generate(prompts, params)
    engine.audit()
    return outputs


PROMPTS = [[i + 1] * 12 for i in range(4)]


def of_prompt(chunk):
    return chunk.sequence.tokens[0]


class Faults:
    """Raises or poisons at "forward" or "hidden" while `when(work)` holds."""

    def __init__(self, engine, point, action, when):
        self.count = 0
        self.point, self.action, self.when = point, action, when
        engine.core.runner.fault_hook = self

    def __call__(self, point, work, tensor):
        if point == self.point and self.when(work, self.count):
            self.count += 1
            self.action(work, tensor)


def raise_oom(_work, _tensor):
    raise torch.OutOfMemoryError("injected")


def raise_layer(_work, _tensor):
    raise ValueError("a layer that raises")


def test_one_passing_out_of_memory_costs_no_job(engine):
    expected = [o.token_ids for o in run(engine, PROMPTS)]
    Faults(engine, "forward", raise_oom, lambda _work, count: count < 1)
    assert [o.token_ids for o in run(engine, PROMPTS)] == expected
    assert engine.stats.oom_retries_total == 1


def test_a_step_that_is_too_large_is_run_in_pieces(engine):
    expected = [o.token_ids for o in run(engine, PROMPTS)]
    faults = Faults(
        engine, "forward", raise_oom, lambda work, _count: sum(c.count for c in work) > 3
    )
    assert [o.token_ids for o in run(engine, PROMPTS)] == expected
    assert faults.count > 0
    assert engine.core.scheduler.limits.max_num_batched_tokens < 32


def test_a_job_that_never_fits_memory_ends_and_the_others_go_on(engine):
    expected = [o.token_ids for o in run(engine, PROMPTS)]
    Faults(engine, "forward", raise_oom, lambda work, _count: any(of_prompt(c) == 2 for c in work))
    outputs = run(engine, PROMPTS)
    assert outputs[1].finish_reason == "error"
    assert "OutOfMemoryError" in outputs[1].error
    assert [o.token_ids for i, o in enumerate(outputs) if i != 1] == [
        tokens for i, tokens in enumerate(expected) if i != 1
    ]


def test_a_layer_that_raises_for_one_job_ends_that_job(engine):
    expected = [o.token_ids for o in run(engine, PROMPTS)]
    Faults(
        engine, "forward", raise_layer, lambda work, _count: any(of_prompt(c) == 3 for c in work)
    )
    outputs = run(engine, PROMPTS)
    assert [o.finish_reason for o in outputs] == ["length", "length", "error", "length"]
    assert "a layer that raises" in outputs[2].error
    assert outputs[0].token_ids == expected[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_poisoned_row_ends_its_job_and_never_reaches_the_cache(engine, value):
    expected = [o.token_ids for o in run(engine, PROMPTS)]
    fresh = [[9] * 20, [10] * 20]

    def poison(work, hidden):
        row = 0
        for chunk in work:
            if of_prompt(chunk) == 9:
                hidden[row : row + chunk.count] = value
            row += chunk.count

    Faults(engine, "hidden", poison, lambda _work, _count: True)
    outputs = run(engine, [*fresh, *PROMPTS[:2]])
    assert [o.finish_reason for o in outputs] == ["error", "length", "length", "length"]
    assert "NaN" in outputs[0].error
    assert [o.token_ids for o in outputs[2:]] == expected[:2]
    engine.core.runner.fault_hook = None
    hits = engine.stats.cache_hits_total
    run(engine, [fresh[0]])
    assert engine.stats.cache_hits_total == hits
    run(engine, [fresh[1]])
    assert engine.stats.cache_hits_total > hits


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_abort_at_every_stage_gives_one_event_and_frees_everything(engine, after):
    engine.add("a", [1] * 60, GREEDY)
    engine.add("b", [2] * 60, GREEDY)
    events = [event for _ in range(after) for event in engine.step()]
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    while engine.has_work:
        events += engine.step()
        engine.audit()
    last = [event.finish_reason for event in events if event.id == "a" and event.finish_reason]
    assert last == ["cancelled"]
    assert [e.finish_reason for e in events if e.id == "b"][-1] == "length"
    assert engine.core.scheduler.pool.num_used == 0
    engine.add("a", [1], GREEDY)
    engine.abort("a")
    engine.step()


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ([], {}, "empty_prompt"),
        ([1, 259], {}, "token_out_of_range"),
        ([-1], {}, "token_out_of_range"),
        ([1.5], {}, "token_out_of_range"),
        ([1] * 257, {}, "prompt_too_long"),
        ([1], {"stop_token_ids": [999]}, "token_out_of_range"),
        ([1], {"logit_bias": {999: 1.0}}, "token_out_of_range"),
    ],
)
def test_a_bad_request_is_refused_by_code_and_disturbs_nobody(engine, prompt, params, code):
    engine.add("good", [1, 2, 3], GREEDY)
    with pytest.raises(InvalidRequest) as caught:
        engine.add("bad", prompt, SamplingParams(**params))
    assert caught.value.code == code
    with pytest.raises(InvalidRequest, match="good"):
        engine.add("good", [1], GREEDY)
    tokens = []
    while engine.has_work:
        tokens += [t for event in engine.step() for t in event.token_ids]
    assert len(tokens) == 8


def test_a_job_larger_than_the_pool_is_refused_and_those_behind_it_run(tiny_random):
    config = EngineConfig(tiny_random("llama"), block_size=8, num_blocks=4, dtype="float32",
                          max_num_seqs=2)  # fmt: skip
    engine = Engine(config)
    big, outgrowing, fitting, unbounded = engine.generate(
        [[1] * 40, [1] * 8, [1] * 8, [1] * 8],
        [
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=25),
            SamplingParams(max_tokens=24, ignore_eos=True),
            SamplingParams(max_tokens=None, ignore_eos=True),
        ],
    )
    assert (big.finish_reason, outgrowing.finish_reason) == ("error", "error")
    assert "KV blocks" in outgrowing.error
    assert len(fitting.token_ids) == 24
    assert len(unbounded.token_ids) == 24
    engine.audit()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "hot"),
        ("top_p", 1.1), ("top_p", -0.1), ("top_k", -2), ("min_p", 2.0), ("n", 0), ("n", 129),
        ("max_tokens", -1), ("min_tokens", 17), ("seed", 2**64), ("stop", [""]),
        ("stop", ["a"] * 17),
        ("presence_penalty", 3.0), ("frequency_penalty", -3.0), ("repetition_penalty", 0.0),
        ("logprobs", 21), ("prompt_logprobs", -1), ("logprobs_mode", "cooked"),
        ("logit_bias", {1: float("inf")}), ("logit_bias", {"a": 1.0}),
        ("structured_outputs", {}), ("structured_outputs", {"json": {}, "regex": "a"}),
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(field, value):
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.code == "invalid_parameter"


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 24}, {"max_num_seqs": 0}, {"dtype": "int4"}, {"device": "tpu"},
        {"gpu_memory_fraction": 0.0}, {"num_blocks": 0}, {"quantization": "int3"},
        {"kv_cache_dtype": "fp4"}, {"max_num_batched_tokens": 8}, {"max_num_seqs": 2**31},
        {"gpu_memory_fraction": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_out_of_range_is_named(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        EngineConfig("model", **changes)


def test_settings_that_do_not_fit_the_model_are_refused(tiny_random):
    path = tiny_random("llama")
    with pytest.raises(ConfigError, match="max_model_len"):
        Engine(EngineConfig(path, max_model_len=100_000))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda"):
            Engine(EngineConfig(path, device="cuda"))


def test_ids_beyond_the_tokenizer_are_never_chosen(tiny_random):
    engine = Engine(EngineConfig(tiny_random("llama", vocab_size=300), dtype="float32",
                                 num_blocks=64))  # fmt: skip
    assert engine.text.vocab_size == 259
    biased = SamplingParams(max_tokens=64, temperature=2.0, seed=1, ignore_eos=True,
                            logit_bias={280: 100.0})  # fmt: skip
    output = engine.generate([[1, 2, 3]], biased)[0]
    assert max(output.token_ids) < 259


def test_bias_and_minimum_length_act_in_a_mixed_batch(engine):
    eos = engine.core.spec.eos_token_ids[0]
    pushed = SamplingParams(max_tokens=6, temperature=0.0, min_tokens=3, logit_bias={eos: 100.0})
    banned = SamplingParams(max_tokens=6, temperature=0.0, logit_bias={eos: -100.0})
    plain = engine.generate([[1, 2]], SamplingParams(max_tokens=6, temperature=0.0))[0]
    a, b, c = engine.generate([[5], [5], [1, 2]], [pushed, banned, SamplingParams(
        max_tokens=6, temperature=0.0)])  # fmt: skip
    assert (len(a.token_ids), a.finish_reason) == (4, "stop")
    assert eos not in b.token_ids
    assert c.token_ids == plain.token_ids
