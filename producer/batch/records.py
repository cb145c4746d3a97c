"""The lines of output and error file, in the shape of the Batch API.

    {"id": "batch_req_<batch>_<line>", "custom_id": ..., "response": {...}, "error": null}

A request that was answered has a response, also when the answer is a refusal (status 400); one that
never was (cancelled, expired) has an error instead.

Invariant: `line_of(id, batch)` gives back the line number: the files themselves say what is done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenfleet.producer.batch.check import Problem
from tokenfleet.producer.batch.refusals import ErrorAnswer, error_answer, failed_answer
from tokenfleet.producer.batch.responses import ResponseShape
from tokenfleet.producer.errors import UndecodableJob
from tokenfleet.producer.protocol import JobResult, State

_PREFIX = "batch_req_"
_BREAKS = str.maketrans({"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"})


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended, as its hash has it."""

    job_id: str
    state: State
    result: bytes | None
    code: str
    message: str
    attempts: int
    claimed_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True)
class Record:
    """One line to write."""

    line: int
    failed: bool
    """It belongs into the error file."""
    content: Mapping[str, Any]

    def encoded(self) -> bytes:
        """The line with its end; what some readers take for a line break is escaped."""
        text = json.dumps(self.content, ensure_ascii=False, separators=(",", ":"))
        if not text.isascii():
            text = text.translate(_BREAKS)
        return text.encode() + b"\n"


def record_of(batch: str, line: int, custom_id: str, shape: ResponseShape, job: Ended) -> Record:
    """The record of a line whose job has ended."""
    base = {"id": request_id(batch, line), "custom_id": custom_id}
    if job.state is State.FINISHED and job.result is not None:
        try:
            result = JobResult.unpack(job.result)
        except UndecodableJob as error:  # a newer worker's: this line's fault alone
            response = _response(job.job_id, 500, error_answer(error).body)
            return Record(line, True, {**base, "response": response, "error": None})
        body = shape.body(
            result, job_id=job.job_id, created_s=job.ended_ms // 1000, extra=_own(job, result)
        )
        return Record(
            line, False, {**base, "response": _response(job.job_id, 200, body), "error": None}
        )
    if job.state in (State.CANCELLED, State.EXPIRED):
        return Record(line, True, {**base, "response": None, "error": _never(job.state)})
    answer = failed_answer(job.code, job.message)
    body = {**answer.body, "tokenfleet": {"job_id": job.job_id, "attempts": job.attempts}}
    response = _response(job.job_id, answer.status_code, body)
    return Record(line, True, {**base, "response": response, "error": None})


def refusal_of(batch: str, problem: Problem) -> Record:
    """The record of a line that was refused before it was submitted: status 400, error null."""
    line = problem.line or 0
    answer = ErrorAnswer(400, problem.code, problem.message, problem.param)
    body = answer.body
    body["error"]["line"] = line
    name = request_id(batch, line)
    response = _response(name, 400, body)
    base = {"id": name, "custom_id": problem.custom_id}
    return Record(line, True, {**base, "response": response, "error": None})


def request_id(batch: str, line: int) -> str:
    """The id of a line of output."""
    return f"{_PREFIX}{batch.removeprefix('batch_')}_{line}"


def line_of(name: object, batch: str) -> int | None:
    """The line number in such an id; None when it is of no line of this batch."""
    prefix = f"{_PREFIX}{batch.removeprefix('batch_')}_"
    if not isinstance(name, str) or not name.startswith(prefix):
        return None
    number = name.removeprefix(prefix)
    return int(number) if number.isascii() and number.isdigit() else None


def _response(name: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": name, "body": body}


def _own(job: Ended, result: JobResult) -> dict[str, Any]:
    """What the summary is made from, and people ask for."""
    return {
        "job_id": job.job_id,
        "worker": result.worker,
        "attempts": result.attempts,
        "claimed_ms": job.claimed_ms,
        "ended_ms": job.ended_ms,
        "queue_s": _rounded(result.timings.queue_s),
        "first_token_s": _rounded(result.timings.first_token_s),
        "total_s": _rounded(result.timings.total_s),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _never(state: State) -> dict[str, str]:
    if state is State.CANCELLED:
        return {"code": "batch_cancelled", "message": "the job of this line was cancelled"}
    return {
        "code": "batch_expired",
        "message": "this request could not be run before the completion window was over",
    }
