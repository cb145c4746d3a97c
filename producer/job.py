"""A handle on one job: its stream, its state, its end.

Invariant: a handle holds nothing but the id and a way to its client's connections; it may be made
again from the id anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from tokenfleet.producer.absence import Absence
from tokenfleet.producer.checks import is_number
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import (
    DeadlineExceeded,
    InvalidJob,
    JobCancelled,
    JobExpired,
    JobFailed,
    ResultTimeout,
)
from tokenfleet.producer.keys import keys_of
from tokenfleet.producer.protocol import Event, EventError, JobResult, JobStatus, State
from tokenfleet.producer.stream import JobReader, as_int
from tokenfleet.producer.submission import Submission

NOT_SENT = (
    "a job's handle belongs to its client and cannot be copied or sent to another process; "
    "send job.id, and make the handle there: client.job(job_id)"
)


@dataclass(frozen=True, slots=True)
class Link:
    """What one process and event loop uses of a client."""

    connection: Connection
    submission: Submission
    reader: JobReader
    loop: asyncio.AbstractEventLoop
    pid: int


class AsyncJob:
    """A handle on one job. It holds no resources."""

    def __init__(
        self, link_of: Callable[[], Link], job_id: str, *, deduplicated: bool = False
    ) -> None:
        self._link_of = link_of
        self.id = job_id
        self.deduplicated = deduplicated
        """True when the idempotency key had brought this job before."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_SENT)

    def stream(self, from_offset: int = 0) -> AsyncGenerator[Event, None]:
        """Every event from `from_offset` on, each once and in order, to the terminal one.

        Raises JobExpired and StreamInterrupted; how the job ended says the last event. As with any
        generator, a read that is cancelled (a timeout around `anext`) ends this stream: go on with
        another one from the last event's `end`.
        """
        return self._link_of().reader.follow(self.id, from_offset)

    async def status(self) -> JobStatus:
        """The job now. Raises JobExpired when Redis does not know it."""
        link = self._link_of()
        await link.connection.ready()
        look = await link.reader.look(self.id, served=True)
        if look.state is None:
            raise JobExpired(self.id)
        fields = look.fields
        return JobStatus(
            id=self.id,
            state=look.state,
            attempt=int(fields["attempt"]),
            failures=int(fields["failures"]),
            owner=fields.get("owner"),
            offset=int(fields["offset"]),
            model=fields["model"],
            priority=fields["priority"],
            submitted_ms=int(fields["submitted"]),
            due_ms=as_int(fields, "due"),
            deadline_ms=as_int(fields, "deadline"),
            ended_ms=as_int(fields, "ended"),
            cancel_requested="cancel" in fields,
            served=look.served,
            paused=look.paused,
            error=_error_of(fields),
        )

    async def cancel(self) -> State:
        """Ask for the end. Returns the state then: `running` means its worker has been told.

        Raises JobExpired when Redis does not know the job. On a job that has ended: nothing.
        """
        link = self._link_of()
        await link.connection.ready()
        state = await link.reader.cancel(self.id)
        if state is None:
            raise JobExpired(self.id)
        return state

    async def result(self, timeout_s: float | None = None) -> JobResult:
        """Wait for the end and return what came out. Redis is asked once, however short the time.

        Raises JobFailed, JobCancelled, DeadlineExceeded as the job ended, JobExpired when Redis no
        longer knows it, and ResultTimeout after `timeout_s`: the job goes on then.
        """
        if timeout_s is not None and not is_number(timeout_s):
            raise InvalidJob("timeout_s", timeout_s, "must be seconds, or None")
        link = self._link_of()
        await link.connection.ready()
        state = (await link.reader.look(self.id)).state
        if state is None:
            raise JobExpired(self.id)
        if not state.terminal:
            await self._wait(link.reader, timeout_s, [state])
        return await self._fetch()

    async def _wait(self, reader: JobReader, timeout_s: float | None, seen: list[State]) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await _until_ended(reader, self.id, seen)
        except TimeoutError as error:
            raise ResultTimeout(self.id, timeout_s or 0.0, seen[-1]) from error

    async def _fetch(self) -> JobResult:
        connection = self._link_of().connection
        job = keys_of(connection.namespace, self.id).job(self.id)
        names = ("state", "result", "attempt", "error_code", "error_message")
        values = await connection.execute("HMGET", job, *names)
        state, packed, attempt, code, message = values
        if state is None:
            raise JobExpired(self.id)
        if state == b"finished" and packed is not None:
            return JobResult.unpack(packed)
        if state == b"cancelled":
            raise JobCancelled(self.id)
        if state == b"expired":
            raise DeadlineExceeded(self.id)
        if state == b"failed":
            raise JobFailed(self.id, code.decode(), message.decode(), int(attempt))
        raise JobExpired(self.id, "the result of job")


async def _until_ended(reader: JobReader, job_id: str, seen: list[State]) -> None:
    """Return when the job has ended; its states go to `seen` meanwhile."""
    absence = Absence(job_id, reader.silence_s)
    absence.wait_s(seen[-1])
    ear = await reader.subscribe(job_id)
    try:
        while True:
            state = (await reader.look(job_id)).state
            wait_s = absence.wait_s(state) or reader.silence_s
            if state is not None:
                seen[:] = [state]
                if state.terminal:
                    return
            message = await ear.get(wait_s)
            while isinstance(message, bytes) and _is_token(message):
                absence.ran = True
                message = await ear.get(reader.silence_s)
    finally:
        await reader.hub.unsubscribe(ear)


def _is_token(message: bytes) -> bool:
    """An announced event with tokens: not the end."""
    parts = message.split(b" ", 2)
    return len(parts) == 3 and parts[1].endswith(b"-0")


def _error_of(fields: Mapping[str, str]) -> EventError | None:
    if "error_code" not in fields:
        return None
    return EventError(fields["error_code"], fields["error_message"])
