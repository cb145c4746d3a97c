"""Everything that is not a completion and goes back as JSON: errors above all.

An error answer has the body that OpenAI's clients read, and headers that say whether to come again:
`Retry-After` in whole seconds, and `x-should-retry`, which those clients heed.

Invariant: no answer quotes a prompt or names a server of ours, and a fault of ours tells nothing
but that it is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from starlette.responses import JSONResponse

from tokenfleet.producer.batch import ErrorAnswer, error_answer
from tokenfleet.producer.errors import (
    BrokerUnavailable,
    BrokerUnsupported,
    QueueFull,
    StreamInterrupted,
    TokenfleetError,
)

AWAY = "the queue cannot be reached just now; it is the server's fault, try again"
CLIENT_CLOSED = 499
GONE = "client_closed"
"""What a request whose client closed the connection is noted and counted as."""
RETRY_S = 1
"""When to come again after a fault that passes and says no time."""


class GatewayError(Exception):
    """A request that the gateway itself answers with an error."""

    def __init__(self, answer: ErrorAnswer, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(answer.message)
        self.answer = answer
        self.headers = dict(headers or {})


def unauthorized(presented: bool) -> GatewayError:
    """401 for a key that is not known, or was not given."""
    message = (
        "this API key is not known here"
        if presented
        else "no API key was given: send it as `Authorization: Bearer <key>`"
    )
    return GatewayError(
        ErrorAnswer(401, "invalid_api_key", message), {"www-authenticate": "Bearer"}
    )


def refused(status: int, code: str, message: str, param: str | None = None) -> GatewayError:
    """Any other refusal."""
    return GatewayError(ErrorAnswer(status, code, message, param))


def answer_of(error: Exception) -> tuple[ErrorAnswer, dict[str, str]]:
    """Status, body and headers for an error."""
    if isinstance(error, GatewayError):
        return error.answer, {"x-should-retry": "false", **error.headers}
    answer = error_answer(error)
    if isinstance(error, BrokerUnavailable | BrokerUnsupported | StreamInterrupted):
        # their own sentences are for operators: they name the server
        answer = replace(answer, message=AWAY)
    retryable = isinstance(error, TokenfleetError) and error.retryable
    headers = {"x-should-retry": "true" if retryable else "false"}
    if isinstance(error, QueueFull):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, BrokerUnavailable):
        headers["retry-after"] = str(RETRY_S)
    return answer, headers


def error_response(error: Exception) -> JSONResponse:
    """The response to a request that ended in this error."""
    answer, headers = answer_of(error)
    return JSONResponse(answer.body, answer.status_code, headers)
