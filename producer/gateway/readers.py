"""Readers of a job: they follow it while they are there, and what happens when they go.

Invariant: a job that ends with its readers hears of each that leaves before its end, whichever way
it was read.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.requests import Request

from tokenfleet.producer.errors import TokenfleetError
from tokenfleet.producer.gateway.chunks import Completion
from tokenfleet.producer.gateway.context import Gateway, gateway_of, note
from tokenfleet.producer.gateway.sse import until_gone
from tokenfleet.producer.job import AsyncJob
from tokenfleet.producer.protocol import JobResult

ALARM_SLACK_S = 0.02
"""Deadlines are counted by the server's clock, from when it had the job."""


class JobFrames:
    """A completion's frames; a job that is left before its end is told so."""

    def __init__(self, gateway: Gateway, completion: Completion, alarm: Alarm) -> None:
        self._gateway = gateway
        self._completion = completion
        self._alarm = alarm
        self._frames = completion.frames()

    def __aiter__(self) -> JobFrames:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._frames)

    async def aclose(self) -> None:
        """Give the job up as `on_disconnect` says, if it has not ended."""
        self._alarm.close()
        await self._frames.aclose()
        if not self._completion.ended:
            await forsake(self._gateway, self._completion.place.job_id)


class Alarm:
    """Looks at a job when its deadline has come.

    A job that no worker touches ends by being looked at; its readers would do so only now and then.
    """

    def __init__(self, gateway: Gateway, job_id: str, deadline_s: float | None) -> None:
        self._reader = gateway.client.link.reader
        self._job_id = job_id
        self._looking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(deadline_s + ALARM_SLACK_S, self._ring)

    def close(self) -> None:
        """The reader has left, or the job has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()

    def _ring(self) -> None:
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        with suppress(TokenfleetError):  # its readers meet the same trouble
            await self._reader.look(self._job_id)


async def forsake(gateway: Gateway, job_id: str) -> None:
    """A reader has gone: a job that ends with its readers does so, if this was the last one.

    Leaving the stream does the same, but for a reader that went before it had begun to listen.
    """
    reader = gateway.client.link.reader
    with suppress(TokenfleetError):  # the worker sees that nobody listens
        await reader.look(job_id, watch=True)
        await reader.cancel(job_id, if_abandoned=True)


async def awaited(request: Request, job: AsyncJob) -> JobResult:
    """The job's result, while somebody waits for it.

    It is waited for as a reader of the stream, so that a gateway that dies counts as gone too.
    """
    ended = False

    async def follow() -> JobResult:
        nonlocal ended
        stream = job.stream()
        async for event in stream:
            ended = event.final
            if event.token_ids and "ttft_ms" not in request.state.notes:
                note(request, ttft_ms=round((time.monotonic() - began) * 1000, 1))
        return await job.result()

    began = time.monotonic()
    try:
        return await until_gone(request.receive, follow())
    finally:
        if not ended:
            await asyncio.shield(forsake(gateway_of(request), job.id))
