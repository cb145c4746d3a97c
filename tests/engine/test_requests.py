"""The life of requests: ids, stops, resumption, branches, and what one bad one may cost."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch

from tokenfleet.engine import Engine, EngineConfig, InvalidRequest, SamplingParams
from tokenfleet.engine.text import TextCodec

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def make(path, **changes):
    defaults = {"max_num_seqs": 8, "block_size": 8, "num_blocks": 128, "max_num_batched_tokens": 64}
    return Engine(EngineConfig(path, dtype="float32", device="cpu", **{**defaults, **changes}))


@pytest.fixture
def engine(tiny_random):
    return make(tiny_random("llama"))


def drain(engine):
    """Events by id until the engine is idle."""
    events = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.id, []).append(event)
        engine.audit()
    return events


def ends(events):
    return [event.finish_reason for event in events if event.finish_reason]


def test_a_stop_string_ends_a_choice_once_and_frees_its_id(script_model):
    engine = make(script_model(list(b"abcdefgh")))
    params = SamplingParams(max_tokens=20, temperature=0.0, stop=["de"])
    for _ in range(2):
        engine.add("x", [0], params)
        events = drain(engine)["x"]
        assert "".join(event.text for event in events) == "abc"
        assert ends(events) == ["stop"]
        assert events[-1].stop == "de"
        assert [t for event in events for t in event.token_ids] == list(b"abcde")
    included = SamplingParams(max_tokens=20, temperature=0.0, stop=["de"], include_stop=True)
    assert engine.generate([[0]], included)[0].text == "abcde"


def test_a_cancelled_choice_is_no_stopped_one_whatever_its_half_character_becomes(script_model):
    engine = make(script_model([0xC3, *b"abc"]))
    engine.add("x", [0], SamplingParams(max_tokens=20, temperature=0.0, stop=["\ufffd"]))
    assert [event.token_ids for event in engine.step()] == [[0xC3]]
    engine.abort("x")
    (last,) = engine.step()
    assert (last.finish_reason, last.stop) == ("cancelled", None)
    stuck = {"allowed_token_ids": [0xC3], "bad_words": [[0xC3, 0xC3]]}
    engine.add("y", [0], SamplingParams(max_tokens=20, temperature=0.0, stop=["\ufffd"], **stuck))
    assert [event.token_ids for event in engine.step()] == [[0xC3]]
    (last,) = engine.step()
    assert (last.finish_reason, last.error_code, last.stop) == ("error", "no_token_allowed", None)


def test_a_new_request_gets_none_of_an_aborted_ones_events(engine):
    engine.add("x", [1, 2, 3], GREEDY)
    engine.step()
    engine.abort("x")
    with pytest.raises(InvalidRequest, match="'x'"):
        engine.add("x", [4], GREEDY)
    assert ends(engine.step()) == ["cancelled"]
    engine.add("x", [1, 2, 3], GREEDY)
    assert ends(drain(engine)["x"]) == ["length"]


def test_a_resumed_output_that_had_ended_ends_at_once(script_model):
    engine = make(script_model(list(b"abc")))
    eos = engine.core.spec.eos_token_ids[0]
    params = SamplingParams(max_tokens=20, temperature=0.0)
    for resume, more in (
        ((*b"ab", eos), {}),
        (tuple(b"ab"), {"stop": ["b"]}),
        (tuple(b"ab"), {"stop_token_ids": [ord("b")]}),
        (tuple(b"ab"), {"structured_outputs": {"choice": ["ab"]}}),
    ):
        own = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **more})
        engine.add("x", [0], own, resume=(resume,))
        events = drain(engine)["x"]
        assert ends(events) == ["stop"]
        assert [t for event in events for t in event.token_ids] in ([], [eos])
    with pytest.raises(InvalidRequest, match="resume"):
        engine.add("x", [0], SamplingParams(max_tokens=2), resume=((1, 2, 3),))
    assert engine.generate([[0]], params)[0].text == "abc"


def test_events_of_added_requests_wait_while_generate_runs(engine):
    engine.add("x", [1, 2, 3], GREEDY)
    alone = engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
    events = drain(engine)["x"]
    assert [t for event in events for t in event.token_ids] == alone


@pytest.mark.parametrize("stage", ["launch", "collect"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_generate_that_is_interrupted_leaves_nothing_behind(
    stage, overlap, tiny_random, monkeypatch
):
    engine = make(tiny_random("llama"), overlap=overlap)
    expected = engine.generate([[4, 5]], GREEDY)[0].token_ids
    engine.add("other", [4, 5], GREEDY)
    events = engine.step()
    monkeypatch.setattr(
        engine.core.runner, stage, lambda _given: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]], GREEDY)
    monkeypatch.undo()
    engine.audit()
    while engine.has_work:
        events += engine.step()
        engine.audit()
    assert [t for e in events if e.id == "other" for t in e.token_ids] == expected
    assert engine.core.scheduler.pool.num_used == 0


def test_a_prompt_that_the_tokenizer_refuses_fails_alone(engine, monkeypatch):
    bad = "\ud800"
    outputs = engine.generate([bad, "fine"], GREEDY)
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    with pytest.raises(InvalidRequest) as caught:
        engine.add("x", bad)
    assert caught.value.code == "bad_prompt"
    for wrong in (5, None):
        with pytest.raises(InvalidRequest, match="list of token ids"):
            engine.add("x", wrong)
    with pytest.raises(ValueError, match=r"\[text\]"):
        engine.generate("Hello")


def test_text_that_cannot_be_decoded_ends_its_own_request(engine):
    engine.add("bad", [1, 2, 3], GREEDY)
    engine.add("good", [4, 5, 6], GREEDY)

    def broken(_token):
        raise RuntimeError("no such piece")

    engine._streams["bad", 0]._detokenizer.push = broken
    events = drain(engine)
    assert ends(events["bad"]) == ["error"]
    assert "no such piece" in events["bad"][-1].error
    assert ends(events["good"]) == ["length"]


def test_a_step_that_cannot_be_prepared_is_tried_again(engine):
    failures = iter([True])

    def fail(point, _work, _tensor):
        if point == "copy" and next(failures, False):
            raise torch.OutOfMemoryError("injected")

    several = SamplingParams(max_tokens=6, n=3, seed=1, ignore_eos=True)
    expected = [c.token_ids for c in engine.generate([[1] * 13], several)[0].choices]
    engine.core.runner.fault_hook = fail
    got = engine.generate([[1] * 13], several)[0]
    assert [c.token_ids for c in got.choices] == expected
    assert next(failures, None) is None


def test_a_step_that_can_never_be_prepared_ends_its_requests_and_no_others(engine):
    def fail(point, _work, _tensor):
        if point == "copy":
            raise ValueError("injected")

    engine.core.runner.fault_hook = fail
    engine.add("bad", [1] * 13, SamplingParams(max_tokens=6, n=3, seed=1, ignore_eos=True))
    assert "error" in ends(drain(engine)["bad"])
    assert len(engine.generate([[2] * 5], GREEDY)[0].token_ids) == 8


def test_a_budget_that_shrank_does_not_shrink_while_idle(engine):
    failures = iter([torch.OutOfMemoryError("injected")])

    def fail_once(point, _work, _hidden):
        if point == "forward":
            for error in failures:
                raise error

    engine.core.runner.fault_hook = fail_once
    engine.generate([[1, 2, 3]], GREEDY)
    assert engine.core.scheduler.limits.max_num_batched_tokens == 32
    for _ in range(4):
        engine.step()
    assert engine.core.scheduler.limits.max_num_batched_tokens == 32


def test_ids_missing_in_the_middle_are_never_chosen_nor_listed(tiny_random, monkeypatch):
    path = tiny_random("llama", vocab_size=300)
    known = TextCodec.load(path).known_tokens - {77, 78}
    monkeypatch.setattr(TextCodec, "known_tokens", known)
    engine = make(path)
    params = SamplingParams(
        max_tokens=30, seed=1, ignore_eos=True, logit_bias={77: 100.0}, logprobs=20,
        prompt_logprobs=20,
    )  # fmt: skip
    output = engine.generate([[1, 2, 3]], params)[0]
    assert set(output.token_ids) <= known
    assert all(set(report) <= known for report in output.logprobs + output.prompt_logprobs[1:])


def test_raw_logprobs_are_the_models_even_where_ids_are_unknown(tiny_random):
    from transformers import AutoModelForCausalLM

    path = tiny_random("llama", vocab_size=300)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    report = make(path).generate([[1, 2, 3]], params)[0].logprobs[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1)
    assert report == pytest.approx({t: wanted[t].item() for t in report}, abs=1e-4)


def test_processed_logprobs_are_those_the_token_was_drawn_from(engine):
    shaped = {"max_tokens": 20, "seed": 3, "temperature": 0.7, "top_k": 5, "ignore_eos": True,
              "presence_penalty": 1.0, "logprobs": 20}  # fmt: skip
    raw = engine.generate([[1, 2, 3]], SamplingParams(**shaped))[0]
    processed = engine.generate([[1, 2, 3]], SamplingParams(**shaped, logprobs_mode="processed"))[0]
    assert raw.token_ids == processed.token_ids
    for token, report in zip(processed.token_ids, processed.logprobs, strict=True):
        assert token in report
        assert len(report) == 5
        assert sum(map(math.exp, report.values())) == pytest.approx(1.0, abs=1e-4)
    assert all(len(report) >= 20 for report in raw.logprobs)
    greedy = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, logprobs_mode="processed")
    for token, report in zip(*(lambda o: (o.token_ids, o.logprobs))(
        engine.generate([[9]], greedy)[0]), strict=True):  # fmt: skip
        assert report[token] == max(report.values())


def test_a_branch_goes_on_inside_the_character_and_the_stop_of_its_trunk(script_model):
    word = "aé-bcd".encode()
    engine = make(script_model(list(word)))
    params = SamplingParams(max_tokens=20, temperature=0.0, stop=["bd"])
    for after, trunk_text in ((2, "a"), (5, "aé-")):
        engine.add("trunk", [0], params)
        seen = "".join(event.text for _ in range(after) for event in engine.step())
        assert seen == trunk_text
        engine.fork("trunk", "branch")
        events = drain(engine)
        for name in ("trunk", "branch"):
            assert seen + "".join(event.text for event in events[name]) == word.decode()


def test_contexts_of_the_prefix_cache_do_not_grow_without_end(engine):
    for i in range(1100):
        engine.core.cache.context(salt=str(i))
    assert len(engine.core.cache._contexts) <= 1024


def test_nothing_is_remembered_of_requests_that_ended(engine):
    engine.add("gone", [1], SamplingParams(n=2), ended=frozenset({0, 1}))
    engine.generate(["a", "b"], GREEDY)
    assert engine.step() == []
    assert not engine.has_work
    assert (engine._streams, engine._params, engine._ready) == ({}, {}, [])


def test_parameters_can_be_copied_and_sent(engine):
    params = SamplingParams(logit_bias={3: 1.0}, stop="x", stop_token_ids=[1])
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)  # noqa: S301
    assert params.stop == ("x",)
    output = engine.generate([np.array([1, 2, 3])], GREEDY)[0]
    assert output.finish_reason == "length"
    assert json.dumps(output.prompt_token_ids) == "[1, 2, 3]"


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": 3}, {"stop_token_ids": 3}, {"stop_token_ids": "12"}, {"logit_bias": [1]},
        {"ignore_eos": "no"}, {"min_tokens": 2**63, "max_tokens": None}, {"max_tokens": 2**40},
        {"temperature": 10**400}, {"top_k": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_a_parameter_of_the_wrong_kind_is_refused_by_name(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_many_choices_are_one_grammar_and_too_many_rows_are_refused_before_the_step(engine):
    options = [f"item number {i}!" for i in range(3000)]
    params = SamplingParams(max_tokens=60, seed=1, structured_outputs={"choice": options})
    output = engine.generate([[1]], params)[0]
    assert output.text in options, output


def test_slow_grammars_cost_those_behind_them_time_only(engine, monkeypatch):
    import threading

    from tokenfleet.engine import compiling
    from tokenfleet.engine.constraints import ConstraintCompiler

    gate, real = threading.Event(), ConstraintCompiler.compile

    def slow(self, wanted):
        if wanted == {"regex": "slow"}:
            gate.wait(60)
        return real(self, wanted)

    monkeypatch.setattr(ConstraintCompiler, "compile", slow)
    monkeypatch.setattr(compiling, "COMPILE_LIMIT_S", 0.2)
    engine.add("slow", [1], SamplingParams(structured_outputs={"regex": "slow"}))
    engine.add("quick", [1], SamplingParams(structured_outputs={"regex": "[ab]{2}"}))
    events = drain(engine)
    gate.set()
    assert ends(events["slow"]) == ["error"]
    assert ends(events["quick"]) == ["stop"]
