"""Output that follows a grammar, beside output that does not."""

import json
import re

import pytest

from tokenfleet.engine import Engine, EngineConfig, InvalidRequest, SamplingParams
from tokenfleet.engine.compiling import Compiling
from tokenfleet.engine.constraints import ConstraintCompiler
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.text import TextCodec

FREE = SamplingParams(max_tokens=16, temperature=0.9, seed=4, ignore_eos=True)


@pytest.fixture
def engine(tiny_random):
    return Engine(
        EngineConfig(tiny_random("llama", vocab_size=300), dtype="float32", device="cpu",
                     num_blocks=256, block_size=8, max_num_seqs=8)
    )  # fmt: skip


def structured(kind, value, **more):
    return SamplingParams(
        **{"max_tokens": 200, "seed": 1, "structured_outputs": {kind: value}, **more}
    )


def test_each_kind_of_grammar_is_followed_beside_free_text(engine):
    alone = engine.generate([[5, 6, 7]], FREE)[0].token_ids
    wanted = [
        structured("regex", "[a-f]{3}-[0-9]{2}"),
        structured("choice", ["red", "green", "blue"]),
        structured("json", {"enum": ["x", 7, None]}),
        structured("grammar", 'start: "<" /[a-z]{2,4}/ ">"'),
        FREE,
    ]
    outputs = engine.generate([[5, 6, 7]] * 5, wanted)
    engine.audit()
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", outputs[0].text)
    assert outputs[1].text in ("red", "green", "blue")
    assert json.loads(outputs[2].text) in ("x", 7, None)
    assert re.fullmatch("<[a-z]{2,4}>", outputs[3].text)
    assert [o.finish_reason for o in outputs[:4]] == ["stop"] * 4
    assert outputs[4].token_ids == alone


def test_samples_and_forks_follow_the_grammar_on_their_own(engine):
    params = structured("regex", "[ab]{12}", n=4, temperature=1.5)
    engine.add("many", [1, 2], params)
    texts = {}
    before = None
    while engine.has_work:
        for event in engine.step():
            key = (event.id, event.choice)
            texts[key] = texts.get(key, "") + event.text
        if before is None and len(texts.get(("many", 0), "")) >= 5:
            before = texts["many", 0]
            engine.fork("many", "branch")
        engine.audit()
    for choice in range(4):
        assert re.fullmatch("[ab]{12}", texts["many", choice])
    assert len({texts["many", choice] for choice in range(4)}) > 1
    # the fork's own four samples: their prompt is what the trunk had written
    for choice in range(4):
        assert re.fullmatch("[ab]{12}", before + texts["branch", choice])


def test_a_resumed_output_goes_on_in_its_grammar(engine):
    params = structured("regex", "[a-z]{30}", temperature=1.2)
    whole = engine.generate([[3]], params)[0]
    engine.add("again", [3], params, resume=(tuple(whole.token_ids[:11]),))
    rest = []
    while engine.has_work:
        for event in engine.step():
            rest += event.token_ids
    assert whole.token_ids[:11] + rest == whole.token_ids


def test_a_preempted_output_goes_on_in_its_grammar(tiny_random):
    engine = Engine(
        EngineConfig(tiny_random("llama"), dtype="float32", device="cpu", num_blocks=9,
                     block_size=8, max_num_seqs=4)
    )  # fmt: skip
    params = [structured("regex", "[a-z]{40}", seed=i, max_tokens=41) for i in range(4)]
    outputs = engine.generate([[i] * 4 for i in range(4)], params)
    assert engine.stats.preemptions_total > 0
    assert all(re.fullmatch("[a-z]{40}", output.text) for output in outputs)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json", {"type": "nosuch"}, "nosuch"),
        ("json", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("regex", "a(b", "unclosed"),
        ("grammar", "begin: 3", "Expected value"),
        ("choice", [], "at least one"),
        ("choice", [1], "string"),
        ("json", {"const": "x" * 200_000}, "bytes"),
        ("regex", r"[^\s\S]", "no text at all"),
    ],
)
def test_a_grammar_that_is_not_supported_ends_its_request_alone(engine, kind, value, message):
    bad, good = engine.generate([[1], [5, 6, 7]], [structured(kind, value), FREE])
    assert bad.finish_reason == "error"
    assert message in bad.error
    assert "<" not in bad.error  # what the parser dumps of itself
    assert len(good.token_ids) == 16
    engine.audit()


def test_a_request_can_be_aborted_while_its_grammar_compiles(engine, monkeypatch):
    import threading

    gate = threading.Event()
    monkeypatch.setattr(ConstraintCompiler, "compile", lambda *_: gate.wait(60))
    engine.add("slow", [1], structured("regex", "a"))
    with pytest.raises(InvalidRequest, match="running already"):
        engine.add("slow", [1], FREE)
    engine.abort("slow")
    events = engine.step()
    gate.set()
    assert [(e.id, e.finish_reason) for e in events] == [("slow", "cancelled")]


def test_a_slow_grammar_that_is_aborted_holds_nobody_up(engine, monkeypatch):
    import threading

    begun, gate, real = threading.Event(), threading.Event(), ConstraintCompiler.compile

    def compile_(self, wanted):
        if wanted == {"regex": "slow"}:
            begun.set()
            gate.wait(60)
        return real(self, wanted)

    monkeypatch.setattr(ConstraintCompiler, "compile", compile_)
    engine.add("slow", [1], structured("regex", "slow"))
    engine.add("behind", [1], structured("regex", "ab"))
    begun.wait(60)
    engine.abort("slow")
    reasons = {}
    while engine.has_work:
        reasons |= {event.id: event.finish_reason for event in engine.step()}
    still_slow = not gate.is_set()
    gate.set()
    assert still_slow
    assert reasons == {"slow": "cancelled", "behind": "stop"}


def test_what_is_no_json_is_refused(engine):
    circle, deep = {}, {}
    circle["properties"] = {"circle": circle}
    for _ in range(50_000):
        deep = {"properties": {"deep": deep}}
    for schema in (circle, deep, {(1, 2): 3}):
        with pytest.raises(InvalidRequest, match="no JSON"):
            engine.add("x", [1], structured("json", schema))
    assert not engine.has_work


def test_min_tokens_and_a_grammar_are_refused_together(engine):
    with pytest.raises(InvalidRequest, match="min_tokens"):
        engine.add("x", [1], structured("regex", "a", min_tokens=3))


def test_what_the_first_grammar_needs_can_be_built_before_it_comes(tiny_random):
    text = TextCodec.load(tiny_random("llama"))
    read = []
    compiler = ConstraintCompiler(
        lambda: read.append(1) or text.tokenizer.to_str(), text.vocab_size, text.eos_token_ids
    )
    compiling = Compiling(compiler)
    compiling.prepare()
    compiling.prepare()
    assert not compiling  # nobody waits for it
    compiling.start(EngineRequest("a", [1], structured("regex", "[a-c]{3}")))
    while not (found := list(compiling.ready(wait_for_one=True))):
        pass
    assert found[0][1].accept(ord("b")) is None
    assert read == [1]
