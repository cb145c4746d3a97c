"""What is said of a request that was not answered: a status, and a body in the OpenAI shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Invariant: a 4xx is the request's own fault and comes again when it is repeated unchanged, but for
429; a 5xx is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenfleet.producer.errors import (
    BrokerUnavailable,
    BrokerUnsupported,
    DeadlineExceeded,
    IdempotencyMismatch,
    InvalidJob,
    JobCancelled,
    JobExpired,
    JobFailed,
    QueueFull,
    ResultTimeout,
    StreamInterrupted,
    TokenfleetError,
    UndecodableJob,
)

CALLERS_FAULT = frozenset(
    {"empty_prompt", "bad_prompt", "prompt_too_long", "token_out_of_range", "invalid_parameter"}
    | {"never_fits", "unsupported", "unsupported_grammar", "no_chat_template", "bad_messages"}
    | {"unknown_adapter", "template_error", "tokenization_error", "undecodable"}
    | {"report_too_large", "no_token_allowed"}
)
"""Codes of failed jobs that the request itself explains: status 400."""

_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (IdempotencyMismatch, 409, "idempotency_mismatch"),
    (UndecodableJob, 500, "undecodable"),
    (InvalidJob, 400, "invalid_value"),
    (QueueFull, 429, "queue_full"),
    (JobExpired, 404, "job_expired"),
    (JobCancelled, 499, "job_cancelled"),
    (DeadlineExceeded, 504, "deadline_exceeded"),
    (ResultTimeout, 504, "timeout"),
    (BrokerUnavailable, 503, "broker_unavailable"),
    (BrokerUnsupported, 500, "broker_unsupported"),
    (StreamInterrupted, 503, "stream_interrupted"),
)


class RequestRefused(TokenfleetError, ValueError):
    """A request body cannot be run as it stands; nothing was sent.

    code: `missing_required_parameter`, `unknown_parameter`, `unsupported_parameter`,
        `unsupported_value`, `invalid_type` or `invalid_value`.
    param: where, as `messages[0].content`; None when it is the request as a whole.
    """

    status_code = 400

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An HTTP status, and the body that goes with it."""

    status_code: int
    code: str
    message: str
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = "rate_limit_error" if self.status_code == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def error_answer(error: Exception) -> ErrorAnswer:
    """The answer to a request that ended in this error; a stranger is a 500 and tells nothing."""
    if isinstance(error, RequestRefused):
        return ErrorAnswer(400, error.code, error.message, error.param)
    if isinstance(error, JobFailed):
        return failed_answer(error.code, str(error))
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            param = error.field if isinstance(error, InvalidJob) else None
            return ErrorAnswer(status, code, str(error), param)
    return ErrorAnswer(500, "internal_error", "the server failed at this request")


def failed_answer(code: str, message: str) -> ErrorAnswer:
    """The answer to a request whose job failed with this code."""
    return ErrorAnswer(400 if code in CALLERS_FAULT else 500, code, message)
