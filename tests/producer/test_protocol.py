"""What goes over the wire, and what is refused before or after it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenfleet.producer as producer
from tokenfleet.producer import errors
from tokenfleet.producer.errors import InvalidJob, TokenfleetError, UndecodableJob
from tokenfleet.producer.keys import Keys, new_job_id, partition_for_key, partition_of
from tokenfleet.producer.protocol import (
    Choice,
    Event,
    EventError,
    JobRequest,
    JobResult,
    SamplingParams,
    Timings,
    Usage,
)

texts = st.text(max_size=20)
numbers = st.floats(-2, 2)
params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(8, 4096),
    min_tokens=st.integers(0, 8),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=16).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 2**31), numbers, max_size=3),
    presence_penalty=numbers,
    logprobs=st.none() | st.integers(0, 20),
    structured_outputs=st.none() | st.just({"json": {"type": "object"}}),
)
requests = st.builds(
    JobRequest,
    model=st.text("abc:/-.", min_size=1),
    prompt=st.text(min_size=1),
    sampling=params,
    priority=st.sampled_from(["interactive", "default", "batch"]),
    deadline_s=st.none() | st.floats(0.001, 1e6),
    metadata=st.dictionaries(texts, st.integers() | texts | st.none(), max_size=3).filter(
        lambda found: all(not isinstance(v, int) or abs(v) < 2**63 for v in found.values())
    ),
    idempotency_key=st.none() | st.text(min_size=1, max_size=9),
)
logprobs = st.lists(st.dictionaries(st.integers(0, 99), numbers, max_size=3)).map(tuple)
events = st.builds(
    Event,
    offset=st.integers(0, 2**31),
    choice=st.integers(0, 127),
    attempt=st.integers(0, 1000),
    token_ids=st.lists(st.integers(0, 2**20), max_size=5).map(tuple),
    text=texts,
    finish_reason=st.none() | st.sampled_from(["stop", "length"]),
    logprobs=st.none() | logprobs,
    stop=st.none() | texts | st.integers(0, 99),
    error=st.none() | st.builds(EventError, texts, texts),
    final=st.booleans(),
)


@given(requests)
def test_a_job_comes_back_as_it_was_packed(request):
    assert JobRequest.unpack(request.pack()) == request


@given(events)
def test_an_event_comes_back_as_it_was_packed(event):
    assert Event.unpack(event.pack()) == event


def test_a_result_comes_back_as_it_was_packed():
    choices = (
        Choice(text="ab", token_ids=(1, 2), finish_reason="stop", logprobs=({1: -0.5},), stop="x"),
        Choice(text="cd"),
    )
    result = JobResult(
        choices=choices,
        usage=Usage(prompt_tokens=3, completion_tokens=4),
        timings=Timings(queue_s=0.1),
        prompt_logprobs=(None, {1: -0.1}),
        metadata={"a": 1},
    )
    assert JobResult.unpack(result.pack()) == result
    assert (result.text, result.token_ids, result.usage.total_tokens) == ("ab", (1, 2), 7)


@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_undecodable(packed):
    for kind in (JobRequest, Event):
        try:
            kind.unpack(packed)
        except UndecodableJob:
            continue


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


def of_junk(kind):
    names = [spec.name for spec in dataclasses.fields(kind)]
    return st.fixed_dictionaries({"v": st.just(1)}, optional=dict.fromkeys(names, junk))


@settings(max_examples=30)
@given(of_junk(JobRequest), of_junk(Event), of_junk(JobResult))
def test_no_values_in_known_fields_do_worse_than_undecodable(job, event, result):
    for kind, wire in ((JobRequest, job), (Event, event), (JobResult, result)):
        with contextlib.suppress(UndecodableJob):
            kind.unpack(msgpack.packb(wire))


def test_what_is_said_of_bytes_that_are_too_deep_is_a_reason():
    with pytest.raises(UndecodableJob, match=r"must be msgpack \(\w+\)"):
        JobRequest.unpack(b"\x91" * 100_000)


@pytest.mark.parametrize(
    "wire",
    [
        {"v": 2, "model": "m", "prompt": "x"},
        {"model": "m", "prompt": "x"},
        {"v": 1, "model": "m", "prompt": "x", "from_the_future": True},
        {"v": 1, "model": "m", "prompt": "x", "sampling": {"beam_width": 4}},
        {"v": 1, "model": "m", "prompt": "x", "sampling": {"temperature": -1.0}},
        {"v": 1, "model": "m", "prompt": "x", "sampling": 7},
        {"v": 1, "model": "m"},
        {"v": 1, "prompt": "x"},
        {"v": 1, "model": "m", "prompt": msgpack.ExtType(1, b"x")},
        [1, 2],
    ],
)
def test_what_is_not_understood_is_undecodable(wire):
    with pytest.raises(UndecodableJob):
        JobRequest.unpack(msgpack.packb(wire))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", "a\nb"),
        ("priority", "urgent"),
        ("tenant", "a:b"),
        ("tenant", ""),
        ("prompt", ""),
        ("prompt", 7),
        ("prompt_token_ids", []),
        ("prompt_token_ids", [1, -1]),
        ("prompt_token_ids", [True]),
        ("prompt_token_ids", "abc"),
        ("messages", []),
        ("messages", ["hello"]),
        ("messages", [{"content": "no role"}]),
        ("messages", [{"role": "user"}]),
        ("deadline_s", 0.0),
        ("deadline_s", float("nan")),
        ("deadline_s", True),
        ("delay_s", -1.0),
        ("max_failures", -1),
        ("idempotency_key", ""),
        ("idempotency_key", "half a pair: \ud800"),
        ("traceparent", 5),
        ("tracestate", "half a pair: \ud800"),
        ("metadata", [1]),
        ("on_disconnect", "die"),
        ("adapter", ""),
        ("sampling", {"max_tokens": 3}),
    ],
)
def test_a_bad_field_is_refused_by_name_and_value(field, value):
    given: dict[str, Any] = {"model": "m", "prompt": "x", field: value}
    if field in ("messages", "prompt_token_ids"):
        del given["prompt"]
    with pytest.raises(InvalidJob) as caught:
        JobRequest(**given)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}],
)
def test_exactly_one_kind_of_prompt_is_asked_for(given):
    with pytest.raises(InvalidJob, match="exactly one of prompt, messages, prompt_token_ids"):
        JobRequest(model="m", **given)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("seed", 2**64),
        ("n", 0),
        ("n", 129),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        ("stop", 7),
        ("stop_token_ids", (-1,)),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("logprobs_mode", "cooked"),
        ("ignore_eos", 1),
        ("structured_outputs", {"json": {}, "regex": "a"}),
        ("structured_outputs", {"xml": "a"}),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidJob) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("top_k", [-1, 0, 1])
def test_the_ends_of_the_ranges_are_allowed(top_k):
    SamplingParams(top_k=top_k, top_p=0.0, temperature=0.0, max_tokens=0, seed=-(2**63), n=128)
    SamplingParams(max_tokens=None, min_tokens=100, logprobs=20, repetition_penalty=0.1)


def test_the_parameters_are_those_of_the_engine():
    from tokenfleet.engine.sampling_params import SamplingParams as EngineParams

    ours, theirs = SamplingParams(), EngineParams()
    names = [spec.name for spec in dataclasses.fields(SamplingParams)]
    assert names == [spec.name for spec in dataclasses.fields(EngineParams)]
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name)


def test_a_job_over_the_size_cap_is_refused_with_its_size():
    with pytest.raises(InvalidJob, match=r"262144 bytes.*got '3000\d\d bytes'"):
        JobRequest(model="m", prompt="x" * 300_000).pack()


def test_values_that_msgpack_does_not_have_are_refused():
    with pytest.raises(InvalidJob, match="texts, numbers"):
        JobRequest(model="m", prompt="x", metadata={"a": object()}).pack()


def test_the_prompt_is_in_no_repr():
    request = JobRequest(model="m", prompt="a secret")
    assert "secret" not in repr(request)


def test_a_plain_event_and_a_full_one_are_packed_alike():
    event = Event(offset=3, token_ids=(1,), text="a", attempt=2)
    wire = msgpack.unpackb(event.pack())
    assert wire == {"v": 1, "offset": 3, "attempt": 2, "token_ids": [1], "text": "a"}


def test_job_ids_are_distinct_ordered_in_time_and_name_their_partition():
    ids = [new_job_id(5) for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert ids[0][:13] <= ids[-1][:13]
    assert {partition_of(job_id) for job_id in ids} == {5}


@pytest.mark.parametrize("job_id", ["", "x", "01a229a8-b483-778a-8048-e4f6a10b8345", "{}.0"])
def test_what_is_no_job_id_is_refused(job_id):
    with pytest.raises(InvalidJob, match="job id"):
        partition_of(job_id)


def test_no_two_things_share_a_key():
    keys = Keys("n", 0)
    names = [keys.idempotency("a", "b:c"), keys.idempotency("b", "c"), keys.front("m", "batch")]
    names += [keys.queue("m", "batch"), keys.queue("m:batch", "default"), keys.job("x")]
    names += [keys.events("x"), keys.delay, keys.deadline, keys.dead, keys.live("m"), keys.workers]
    names += [keys.bell("m"), keys.paused, keys.limits, keys.tenant("t", "running")]
    assert len(set(names)) == len(names)
    assert all(name.startswith("{n:0}:") for name in names)


def test_every_client_finds_an_idempotency_key_in_the_same_partition():
    assert [partition_for_key("default", f"k{n}", 16) for n in range(4)] == [9, 15, 5, 3]


def test_everything_exported_is_there_and_every_error_is_exported():
    for name in producer.__all__:
        assert hasattr(producer, name)
    declared = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, TokenfleetError)
    }
    assert declared <= set(producer.__all__)


def test_every_error_says_whether_a_repetition_may_help():
    tree = ast.parse(inspect.getsource(errors))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    retryable = {name for name in classes if getattr(errors, name).retryable}
    assert retryable == {"QueueFull", "BrokerUnavailable", "StreamInterrupted", "ResultTimeout"}
