"""Everything the client library raises, as one tree.

    TokenfleetError
     ├─ InvalidJob (ValueError)        refused before it was sent: field, value, way out
     │   └─ UndecodableJob             a payload in Redis that this version does not understand
     ├─ IdempotencyMismatch            the key was used before, with another payload
     ├─ QueueFull                      come back in .retry_after_s                      retryable
     ├─ BrokerUnavailable              Redis was not reached in time                    retryable
     ├─ BrokerUnsupported              Redis is there, but too old or set up wrongly
     │   └─ KeyOccupied                somebody else's value lies at a name that is ours: .key
     ├─ StreamInterrupted              the stream was cut and could not be taken up     retryable
     ├─ ResultTimeout (TimeoutError)   the job goes on; only the waiting ended          retryable
     └─ JobEnded                       the job has ended, and not with a result
         ├─ JobFailed                  .code, .attempts
         ├─ JobCancelled
         ├─ DeadlineExceeded
         └─ JobExpired                 Redis no longer knows the job

Invariant: `.retryable` is true exactly when the same call, repeated unchanged, may succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenfleetError(Exception):
    """Base of all errors of the client library. Each survives pickle and copy."""

    retryable: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, self.__dict__)


def _remade(
    kind: type[TokenfleetError], args: tuple[Any, ...], fields: dict[str, Any]
) -> TokenfleetError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


class InvalidJob(TokenfleetError, ValueError):
    """A field of a job is not acceptable. Nothing was sent."""

    def __init__(self, field: str, value: object, way_out: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{field}: {way_out}; got {shown}{_hint(value)}")
        self.field = field
        self.value = value
        self.way_out = way_out


def _hint(value: object) -> str:
    """Numbers of other libraries look in a message as if they were Python's own."""
    one = value[0] if isinstance(value, list | tuple) and value else value
    library = type(one).__module__.partition(".")[0]
    if library not in ("numpy", "torch"):
        return ""
    return f", of {library}: .item() and .tolist() make Python's own of it"


class UndecodableJob(InvalidJob):
    """A payload found in Redis that is no job of a schema version known here."""


class IdempotencyMismatch(TokenfleetError):
    """The idempotency key belongs to a job with another payload."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(
            f"idempotency_key {key!r} was used for job {job_id} with another payload; "
            "use a new key for a new job"
        )
        self.key = key
        self.job_id = job_id


class QueueFull(TokenfleetError):
    """The tenant has as many jobs waiting as it may have.

    `job_ids` is in the order of what was submitted: the id of each job that was accepted all the
    same, None for those that were not and may be submitted again after `retry_after_s`.
    """

    retryable = True

    def __init__(self, retry_after_s: float, job_ids: Sequence[str | None] = (None,)) -> None:
        refused = sum(job_id is None for job_id in job_ids)
        super().__init__(
            f"the queue is full: {refused} of {len(job_ids)} job(s) not accepted; "
            f"try again in {retry_after_s:.1f} s"
        )
        self.retry_after_s = retry_after_s
        self.job_ids = tuple(job_ids)


class BrokerUnavailable(TokenfleetError):
    """Redis could not be reached, or did not answer, for as long as the client was told to try."""

    retryable = True


class BrokerUnsupported(TokenfleetError):
    """Redis answered, but cannot be used: its version, its settings or the client handed in."""


class KeyOccupied(BrokerUnsupported):
    """Somebody else's value lies at a name that is ours. What goes by other keys goes on."""

    def __init__(self, key: str, found: str, wanted: str) -> None:
        super().__init__(
            f"{key} holds a {found} that tokenfleet did not write, where its {wanted} belongs; "
            "move it away (RENAME, DEL), or use another namespace"
        )
        self.key = key
        self.found = found
        self.wanted = wanted


class StreamInterrupted(TokenfleetError):
    """The stream was cut and could not be taken up again. `offset` is where to go on. It is no use
    to try again where the log holds what only a newer version of this library can read."""

    retryable = True

    def __init__(self, job_id: str, offset: int, reason: str, *, retryable: bool = True) -> None:
        super().__init__(
            f"stream of job {job_id} cut at offset {offset}: {reason}; "
            f"call stream(from_offset={offset}) to go on"
        )
        self.job_id = job_id
        self.offset = offset
        self.retryable = retryable


class ResultTimeout(TokenfleetError, TimeoutError):
    """The job has not ended yet. It goes on: a timeout never cancels a job."""

    retryable = True

    def __init__(self, job_id: str, timeout_s: float, state: str) -> None:
        super().__init__(
            f"job {job_id} is {state} after {timeout_s:g} s; it goes on, ask again or cancel it"
        )
        self.job_id = job_id
        self.state = state


class JobEnded(TokenfleetError):
    """The job ended without a result."""

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(JobEnded):
    """The job failed for good. `code` is stable and for programs, the message for people."""

    def __init__(self, job_id: str, code: str, message: str, attempts: int) -> None:
        super().__init__(job_id, f"job {job_id} failed after {attempts} attempt(s): {message}")
        self.code = code
        self.attempts = attempts


class JobCancelled(JobEnded):
    """The job was cancelled."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id, f"job {job_id} was cancelled")


class DeadlineExceeded(JobEnded):
    """The job's deadline passed before it was done."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id, f"job {job_id} did not end before its deadline")


class JobExpired(JobEnded):
    """Redis does not know the job (any more): wrong id, or its result or log outlived its TTL."""

    def __init__(self, job_id: str, what: str = "job") -> None:
        super().__init__(
            job_id, f"{what} {job_id} is not in Redis; it was never there, or its TTL is over"
        )
