"""What a caller may hand in: whatever it is, the client takes it or says by name why not."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest

from tokenfleet.producer import (
    AsyncClient,
    BrokerUnavailable,
    BrokerUnsupported,
    Client,
    DeadlineExceeded,
    IdempotencyMismatch,
    InvalidJob,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobRequest,
    KeyOccupied,
    QueueFull,
    ResultTimeout,
    SamplingParams,
    StreamInterrupted,
    TokenfleetError,
    UndecodableJob,
)

HALF = "\ud800"
"""Half of a surrogate pair: what JSON may hold and UTF-8 may not."""
ODD: list[Any] = [
    *(None, "", "5", b"5", HALF, 0, -1, 1.5, True, 10**400, math.nan, math.inf),
    *([], ["a"], [b"a"], [HALF], {}, {"a": 1}, {(1, 2): 3}, {1, 2}, range(3), object()),
    *(np.int64(3), np.float32(0.5), np.array([1, 2]), [np.int64(1)]),
]
PLAIN = {"model": "m", "prompt": "x"}
_SELF: list[Any] = []
_SELF.append(_SELF)
ODD.append(_SELF)


def fields_of(kind: Any) -> list[str]:
    return list(kind.__dataclass_fields__)


def refusal(kind: Any, given: dict[str, Any]) -> tuple[type[Exception], str] | None:
    """How it was refused; None for a record that gets to a worker as it was made."""
    try:
        made = kind(**given)
        job = JobRequest(model="m", prompt="x", sampling=made) if kind is SamplingParams else made
        packed = job.pack()
    except InvalidJob as error:
        return type(error), error.field
    assert JobRequest.unpack(packed) == job, given
    return None


@pytest.mark.parametrize("field", fields_of(SamplingParams))
def test_a_sampling_parameter_is_taken_and_sent_or_refused_by_its_name(field: str) -> None:
    found = {refusal(SamplingParams, {field: value}) for value in ODD}
    names = {field, "min_tokens"} if field == "max_tokens" else {field}
    assert found <= {None, *((InvalidJob, name) for name in names)}
    assert found != {None}


@pytest.mark.parametrize("field", fields_of(JobRequest))
def test_a_jobs_field_is_taken_and_sent_or_refused_by_its_name(field: str) -> None:
    others = {"model": "m"} if field in ("messages", "prompt_token_ids") else PLAIN
    found = {refusal(JobRequest, {**others, field: value}) for value in ODD}
    names = {field, "prompt"} if others is not PLAIN else {field}
    assert found <= {None, *((InvalidJob, name) for name in names)}
    assert found != {None}


@pytest.mark.parametrize(
    ("found", "at"),
    [
        ({"a": [1, {"b": object()}]}, r"\['a'\]\[1\]\['b'\]"),
        ({"a": {(1, 2): 3}}, r"\['a'\]"),
        ({"a": HALF}, r"\['a'\]"),
        ({"a": 2**70}, r"\['a'\]"),
    ],
)
def test_a_value_that_cannot_be_sent_is_told_by_its_place(found: Any, at: str) -> None:
    with pytest.raises(InvalidJob, match=f"metadata: .*at {at}"):
        JobRequest(model="m", prompt="x", metadata=found)
    with pytest.raises(InvalidJob, match="messages: "):
        JobRequest(model="m", messages=({"role": "user", "content": found},))


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": ["a secret"]},
        {"prompt": f"a secret{HALF}"},
        {"messages": "a secret"},
        {"messages": ["a secret"]},
        {"messages": [{"role": 1, "content": "a secret"}]},
        {"messages": [{"role": "user", "content": f"a secret{HALF}"}]},
    ],
)
def test_what_was_asked_stands_in_no_error_about_it(given: Any) -> None:
    with pytest.raises(InvalidJob) as refused:
        JobRequest(model="m", **given)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("value", [np.int64(3), [np.int64(3)], np.array([3])])
def test_numbers_of_other_libraries_are_refused_with_the_way_to_pythons_own(value: Any) -> None:
    with pytest.raises(InvalidJob, match=r"of numpy: \.item\(\) and \.tolist\(\)"):
        SamplingParams(stop_token_ids=value if isinstance(value, list) else [value])
    with pytest.raises(InvalidJob, match="of numpy"):
        SamplingParams(seed=value)


ERRORS: list[TokenfleetError] = [
    InvalidJob("field", 1, "must be 2"),
    UndecodableJob("field", b"x", "must be y"),
    IdempotencyMismatch("key", "id"),
    QueueFull(1.5, ["id", None]),
    BrokerUnavailable("away"),
    BrokerUnsupported("old"),
    KeyOccupied("key", "hash", "stream"),
    StreamInterrupted("id", 3, "cut"),
    ResultTimeout("id", 1.0, "waiting"),
    JobFailed("id", "code", "message", 2),
    JobCancelled("id"),
    DeadlineExceeded("id"),
    JobExpired("id", "the log"),
]


def test_every_error_of_the_library_is_among_those_tried() -> None:
    def below(kind: type[TokenfleetError]) -> set[type[TokenfleetError]]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    public = {kind for kind in below(TokenfleetError) if not kind.__name__.startswith("_")}
    ours = {kind for kind in public if kind.__module__ == TokenfleetError.__module__}
    assert {type(error) for error in ERRORS} | {TokenfleetError, _ended()} == ours


def _ended() -> type[TokenfleetError]:
    return JobFailed.__mro__[1]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, None], ids=["copy", "deep", "pickle"])
def test_an_error_gets_whole_to_another_process(error: TokenfleetError, again: Any) -> None:
    found = again(error) if again else pickle.loads(pickle.dumps(error))  # noqa: S301 # our own
    assert type(found) is type(error)
    assert (str(found), found.args, found.__dict__) == (str(error), error.args, error.__dict__)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"connect_timeout_s": value} for value in (0, -1, None, "5", math.nan)),
        *({"silence_s": value} for value in (0, None)),
        *({"result_ttl_s": value} for value in (-1, None, "x", math.nan, 1e9, 1e300)),
        *({"log_ttl_s": value} for value in (0, 1e-9, math.inf, 1e16)),
        *({"partitions": value} for value in (0, -1, "2", True, 10**6)),
        *({"max_job_bytes": value} for value in (0, None)),
        *({"namespace": value} for value in ("a:b", None)),
        *({"tenant": value} for value in ("", None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_clients_wrong_setting_is_refused_when_it_is_made(kind: Any, wrong: Any) -> None:
    with pytest.raises(InvalidJob, match=next(iter(wrong))):
        kind(**wrong)


@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_client_says_where_it_leads_and_cannot_be_copied(kind: Any) -> None:
    client = kind("redis://user:hunter2@127.0.0.1:1/0", namespace="mine")
    assert repr(client) == f"<{kind.__name__} of Redis at redis://127.0.0.1:1, namespace mine>"
    job = client.job("01a22c84-5d19-77d9-87a0-19edbb55a350.0")
    for one, way_out in ((client, "make one there"), (job, r"send job\.id")):
        for again in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=way_out):
                again(one)


def test_what_is_no_job_is_refused_as_such(valkey: Any) -> None:
    with Client(valkey.url, namespace="values") as client:
        job = client.submit(model="m", prompt="x")
        for job_id in (None, 5, b"x", "", f"{job.id}x", job):
            with pytest.raises(InvalidJob, match="job id"):
                client.job(job_id)  # type: ignore[arg-type]  # that is the test
        for timeout_s in ("5", True, math.nan, math.inf, 10**400):
            with pytest.raises(InvalidJob, match="timeout_s"):
                job.result(timeout_s)  # type: ignore[arg-type]
        for offset in (-1, "5", 1.5, None, True, 10**30, 2**64):
            with pytest.raises(InvalidJob, match="from_offset"):
                next(job.stream(offset))  # type: ignore[arg-type]
        for jobs in (None, 5, {"model": "m", "prompt": "x"}):
            with pytest.raises(InvalidJob, match="jobs: must be a list"):
                client.submit_many(jobs)  # type: ignore[arg-type]
        for one in (None, "x", ("model", "m"), {1: 2}, {"model": "m", "prompt": "x", "x": 1}):
            with pytest.raises(InvalidJob, match="job 1: "):
                client.submit_many([{"model": "m", "prompt": "x"}, one])  # type: ignore[list-item]


def test_a_job_may_be_made_first_and_submitted_then(valkey: Any) -> None:
    with Client(valkey.url, namespace="values") as client:
        request = JobRequest(model="m", prompt="x", tenant="acme", priority="batch")
        (job,) = client.submit_many([request])
        assert (job.status().model, job.status().priority) == ("m", "batch")
