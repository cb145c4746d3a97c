"""Launching a step before the last one is settled changes when events come, and nothing in them."""

import pytest
import torch

from tokenfleet.engine import Engine, EngineConfig, SamplingParams

KINDS = {
    "greedy": {"temperature": 0.0},
    "filtered": {"top_k": 20, "top_p": 0.9},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "listed": {"logprobs": 3},
    "processed": {"top_k": 5, "logprobs": 2, "logprobs_mode": "processed"},
    "at least": {"temperature": 0.0, "min_tokens": 6},
    "prompt": {"prompt_logprobs": 2, "max_tokens": 3},
    "sampled twice": {"n": 2},
    "a grammar": {"structured_outputs": {"regex": "[0-9]{3}-[a-z]{3}"}},
}
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(len(KINDS))]
PARAMS = [SamplingParams(**{"max_tokens": 12, "seed": 3, **kind}) for kind in KINDS.values()]


def make_engine(path, **changes):
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 4, "num_blocks": 60}
    return Engine(EngineConfig(path, dtype="float32", device="cpu", **{**settings, **changes}))


def parts(output):
    return [
        (c.token_ids, c.text, c.finish_reason, c.logprobs, c.prompt_logprobs, c.error)
        for c in output.choices
    ]


@pytest.fixture(scope="module")
def path(tiny_random):
    return tiny_random("llama")


def test_every_kind_of_request_gets_the_same_with_overlap_and_without(path):
    engines = [make_engine(path, overlap=overlap) for overlap in (False, True)]
    without, together = [engine.generate(PROMPTS, PARAMS) for engine in engines]
    assert [parts(output) for output in together] == [parts(output) for output in without]
    assert all(output.finish_reason in ("stop", "length") for output in together)
    engines[1].audit()


def test_a_stop_string_found_late_ends_the_output_where_it_stands(script_model):
    path = script_model([*b"one two three"[:4], *b"xyz"])
    params = SamplingParams(max_tokens=20, temperature=0.0, stop=["x"])
    for overlap in (False, True):
        engine = make_engine(path, overlap=overlap)
        output = engine.generate([[0]], params)[0]
        assert (output.text, output.finish_reason) == ("one ", "stop")
        assert output.token_ids == [*b"one x"]
        while engine.has_work:
            assert engine.step() == []
        engine.audit()


def test_a_request_aborted_with_a_step_in_flight_gets_one_event_and_frees_everything(path):
    engine = make_engine(path, overlap=True)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    expected = engine.generate([[2] * 30], params)[0].token_ids
    engine.add("a", [1] * 30, params)
    engine.add("b", [2] * 30, params)
    events = engine.step() + engine.step() + engine.step()
    engine.abort("a")
    while engine.has_work:
        events += engine.step()
        engine.audit()
    assert [e.finish_reason for e in events if e.id == "a" and e.finish_reason] == ["cancelled"]
    assert [t for e in events if e.id == "b" for t in e.token_ids] == expected
    assert engine.core.scheduler.pool.num_used == 0


def test_an_error_seen_one_step_late_ends_its_job_alone(path):
    engine = make_engine(path, overlap=True)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    expected = [o.token_ids for o in engine.generate([[1] * 5, [2] * 5], params)]

    def poison(point, work, hidden):
        if point == "hidden":
            for row, chunk in enumerate(work):
                if chunk.sequence.tokens[0] == 3 and chunk.start > 6:
                    hidden[row] = torch.nan

    engine.core.runner.fault_hook = poison
    bad, *good = engine.generate([[3] * 5, [1] * 5, [2] * 5], params)
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 3)
    assert [o.token_ids for o in good] == expected
    engine.audit()
