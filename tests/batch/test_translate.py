"""OpenAI bodies become jobs strictly, and results become bodies that the openai package reads."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tokenfleet.producer import (
    BrokerUnavailable,
    Choice,
    InvalidJob,
    JobFailed,
    JobResult,
    QueueFull,
    SamplingParams,
    UndecodableJob,
    Usage,
)
from tokenfleet.producer.batch import (
    CHAT,
    COMPLETIONS,
    IGNORED,
    RequestRefused,
    TranslatedRequest,
    error_answer,
    translate_request,
)
from tokenfleet.producer.batch.records import Ended, record_of
from tokenfleet.producer.protocol import State
from tokenfleet.producer.request import JobRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**body: Any) -> TranslatedRequest:
    return translate_request(CHAT, {"model": "m", "messages": MESSAGES, **body})


def completion(**body: Any) -> TranslatedRequest:
    return translate_request(COMPLETIONS, {"model": "m", "prompt": "hi", **body})


def sampling(request: TranslatedRequest) -> SamplingParams:
    found: SamplingParams = request.job["sampling"]
    return found


def test_every_supported_field_reaches_the_job() -> None:
    body = {
        "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": "x",
        "seed": 3, "presence_penalty": 0.1, "frequency_penalty": -0.1, "logit_bias": {"12": 3},
        "logprobs": True, "top_logprobs": 2, "top_k": 5, "min_p": 0.1,
        "repetition_penalty": 1.1, "min_tokens": 1, "stop_token_ids": [9], "ignore_eos": True,
        "include_stop": True,
        "skip_special_tokens": False, "prompt_logprobs": 1, "logprobs_mode": "processed",
        "metadata": {"a": "b"}, "allowed_token_ids": [4, 9], "bad_words": ["x", [9, 4]],
        "truncate_prompt_tokens": 5,
    }  # fmt: skip
    request = chat(**body)
    assert sampling(request) == SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.9, n=2, stop=("x",), seed=3, presence_penalty=0.1,
        frequency_penalty=-0.1, logit_bias={12: 3.0}, logprobs=2, top_k=5, min_p=0.1,
        repetition_penalty=1.1, min_tokens=1, stop_token_ids=(9,), ignore_eos=True,
        include_stop=True, skip_special_tokens=False, prompt_logprobs=1, logprobs_mode="processed",
        allowed_token_ids=(4, 9), bad_words=("x", (9, 4)), truncate_prompt_tokens=5,
    )  # fmt: skip
    assert request.job["metadata"] == {"a": "b"}
    job = JobRequest(**request.job)
    assert JobRequest.unpack(job.pack()) == job


def test_defaults_are_those_of_the_api() -> None:
    assert sampling(chat()) == SamplingParams(max_tokens=None)
    assert sampling(completion()) == SamplingParams(max_tokens=16)


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_says_nothing_about_the_answer_is_accepted(name: str) -> None:
    value = {str: "auto", bool: True}[IGNORED[name]]
    assert chat(**{name: value}).job == chat().job


def test_null_is_the_same_as_absent() -> None:
    nothing = dict.fromkeys(("stop", "seed", "tools", "max_tokens", "response_format", "best_of"))
    assert chat(**nothing).job == chat().job


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"foo": 1}, "unknown_parameter", "foo"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"functions": [{}]}, "unsupported_parameter", "functions"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"reasoning_effort": "low"}, "unsupported_parameter", "reasoning_effort"),
        ({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
        ({"stream": True}, "unsupported_value", "stream"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"model": 7}, "invalid_type", "model"),
        ({"model": ""}, "invalid_value", "model"),
        ({"model": None}, "missing_required_parameter", "model"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": float("inf")}, "invalid_value", "temperature"),
        ({"top_p": 1.5}, "invalid_value", "top_p"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 2.0}, "invalid_type", "n"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": -1}, "invalid_value", "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "invalid_value", "max_tokens"),
        ({"stop": [1]}, "invalid_value", "stop"),
        ({"stop": [""]}, "invalid_value", "stop"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "invalid_type", "logit_bias.1"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"logprobs": 1}, "invalid_type", "logprobs"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        (
            {"response_format": {"type": "json_schema"}},
            "missing_required_parameter",
            "response_format.json_schema",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "invalid_value", "structured_outputs"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"service_tier": "golden"}, "invalid_value", "service_tier"),
        ({"service_tier": 1}, "invalid_type", "service_tier"),
        ({"store": "yes"}, "invalid_type", "store"),
        ({"user": 5}, "invalid_type", "user"),
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "unknown_parameter",
            "stream_options.continuous_usage_stats",
        ),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "invalid_type", "messages[0].content"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_value",
            "messages[1].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "invalid_type",
            "messages[0].content[0].text",
        ),
    ],
)
def test_a_refusal_names_code_and_place(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        chat(**body)
    assert (refused.value.code, refused.value.param) == (code, param)
    answer = error_answer(refused.value)
    assert answer.status_code == 400
    assert answer.body["error"] == {
        "message": str(refused.value), "type": "invalid_request_error",
        "param": param, "code": code,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt": ["a", "b"]}, "unsupported_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": [1, -2]}, "invalid_value", "prompt"),
        ({"prompt": 5}, "invalid_type", "prompt"),
        ({"prompt": None}, "missing_required_parameter", "prompt"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"messages": MESSAGES}, "unknown_parameter", "messages"),
        ({"logprobs": 21}, "invalid_value", "logprobs"),
    ],
)
def test_completions_refuse_in_the_same_way(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        completion(**body)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(RequestRefused, match="JSON object"):
        translate_request(CHAT, body)


def test_an_endpoint_that_is_not_served_is_refused() -> None:
    with pytest.raises(RequestRefused, match="/v1/embeddings"):
        translate_request("/v1/embeddings", {"model": "m"})


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("hi", {"prompt": "hi"}),
        (["hi"], {"prompt": "hi"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ([[1, 2]], {"prompt_token_ids": [1, 2]}),
    ],
)
def test_one_prompt_may_come_in_any_of_its_shapes(prompt: Any, field: dict[str, Any]) -> None:
    assert field.items() <= completion(prompt=prompt).job.items()


def test_text_parts_are_joined_and_developers_are_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts, "name": None}])
    assert request.job["messages"] == [{"role": "system", "content": "ab"}]


def test_response_formats_become_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert sampling(chat(response_format=wanted)).structured_outputs == {"json": schema}
    anything = sampling(chat(response_format={"type": "json_object"})).structured_outputs
    assert anything == {"json": {"type": "object"}}
    assert sampling(chat(response_format={"type": "text"})).structured_outputs is None
    with pytest.raises(RequestRefused, match="contradict"):
        chat(response_format=wanted, structured_outputs={"regex": "a"})


def test_a_model_given_from_outside_wins() -> None:
    request = translate_request(CHAT, {"model": "gpt-x", "messages": MESSAGES}, model="mine")
    assert request.model == request.job["model"] == "mine"


def test_streams_are_for_those_who_read_along() -> None:
    body = {
        "model": "m", "messages": MESSAGES, "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }  # fmt: skip
    request = translate_request(CHAT, body, streams=True)
    assert (request.stream, request.include_usage) == (True, True)


RESULT = JobResult(
    choices=(
        Choice("ab", (1, 2), "stop", ({1: -0.5, 7: -1.0}, {2: -3.0, 8: -0.1, 9: -0.2})),
        Choice("c", (3,), "length", ({3: 0.0},)),
    ),
    usage=Usage(3, 3, 1),
)


def test_a_chat_response_is_what_the_openai_package_reads() -> None:
    types = pytest.importorskip("openai.types.chat", reason="the gateway's extra is not installed")
    shape = chat(logprobs=True, top_logprobs=1, n=2).shape
    body = shape.body(RESULT, job_id="j.0", created_s=9)
    read = types.ChatCompletion.model_validate(body, strict=True)
    assert (read.id, read.object, read.created, read.model) == (
        "chatcmpl-j.0", "chat.completion", 9, "m",
    )  # fmt: skip
    assert [c.message.content for c in read.choices] == ["ab", "c"]
    assert [c.finish_reason for c in read.choices] == ["stop", "length"]
    first, second = read.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("token_id:1", -0.5, None)
    assert [(t.token, t.logprob) for t in first.top_logprobs] == [("token_id:1", -0.5)]
    assert (second.logprob, second.top_logprobs[0].token) == (-3.0, "token_id:8")
    usage = read.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 3, 6)
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_a_completion_response_is_what_the_openai_package_reads() -> None:
    types = pytest.importorskip("openai.types", reason="the gateway's extra is not installed")
    body = completion(logprobs=2).shape.body(RESULT, job_id="j.0", created_s=9)
    read = types.Completion.model_validate(body)
    assert (read.id, read.object) == ("cmpl-j.0", "text_completion")
    assert read.choices[0].text == "ab"
    logprobs = read.choices[0].logprobs
    assert logprobs.tokens == ["token_id:1", "token_id:2"]
    assert logprobs.token_logprobs == [-0.5, -3.0]
    assert logprobs.top_logprobs[1] == {"token_id:8": -0.1, "token_id:9": -0.2}


def test_logprobs_are_null_unless_asked_for() -> None:
    body = chat().shape.body(RESULT, job_id="j.0", created_s=9)
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]


@pytest.mark.parametrize("request_", [chat(logprobs=True, top_logprobs=2), completion(logprobs=2)])
def test_a_token_that_cannot_come_has_a_logprob_that_json_has(request_: TranslatedRequest) -> None:
    row = {1: 0.0, 2: -math.inf}
    choice = Choice("a", (1, 2), "stop", (row, {1: 0.0, 2: math.nan}))
    result = JobResult(choices=(choice,), prompt_logprobs=(None, row))
    body = request_.shape.body(result, job_id="j.0", created_s=9)
    assert json.dumps(body, allow_nan=False).count("-9999.0") >= 3


def test_a_result_of_a_newer_version_fails_its_line_alone() -> None:
    ended = Ended("j.0", State.FINISHED, b"\x81\xa1v\x02", "", "", 1, 1, 2)
    record = record_of("batch_b", 7, "c", chat().shape, ended)
    assert (record.failed, record.content["error"]) == (True, None)
    assert record.content["response"]["status_code"] == 500
    assert record.content["response"]["body"]["error"]["code"] == "undecodable"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UndecodableJob("result", b"x", "must be msgpack"), 500, "undecodable"),
        (InvalidJob("prompt", "", "must not be empty"), 400, "invalid_value"),
        (JobFailed("j", "prompt_too_long", "too long", 1), 400, "prompt_too_long"),
        (JobFailed("j", "engine_died", "killed", 4), 500, "engine_died"),
        (QueueFull(2.0), 429, "queue_full"),
        (BrokerUnavailable("away"), 503, "broker_unavailable"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
def test_errors_are_answered_with_their_status(error: Exception, status: int, code: str) -> None:
    answer = error_answer(error)
    assert (answer.status_code, answer.code) == (status, code)
    assert "secret" not in answer.message
