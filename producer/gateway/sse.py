"""Server-sent events over ASGI: one response that ends when its source or its reader does.

Invariant: whoever goes first (the source, the reader, the server), the source is closed before the
response returns, so that a job whose reader has gone hears of it at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Protocol, Self, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would hold events back
}

Value = TypeVar("Value")


class Frames(Protocol):
    """Where the frames come from."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def __anext__(self) -> bytes: ...
    async def aclose(self) -> None:
        """No more is wanted; also called at the end. Whatever stands behind it is let go."""


class ReaderGone(Exception):
    """Whoever asked has closed the connection."""


def frame(data: str, event_id: str | None = None) -> bytes:
    """One event. `data` is one line."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}data: {data}\n\n".encode()


class EventStream(Response):
    """Sends the frames of a source as they come.

    Args:
        source: closed here, whatever happens.
        keep_alive_s: a comment goes out after this much silence.
        on_gone: called when the reader goes before the source's end.
    """

    def __init__(self, source: Frames, *, keep_alive_s: float, on_gone: Callable[[], None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._on_gone = on_gone
        self._keep_alive_s = keep_alive_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends or the reader goes; close the source either way."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        beat: asyncio.Task[None] | None = None
        try:
            await send(start)
            self._sent_at = time.monotonic()
            beat = asyncio.create_task(self._beat(send))
            await until_gone(receive, self._pump(send))
        except ReaderGone:
            self._on_gone()
            return
        finally:
            await end(beat)
            await self._source.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        async for one in self._source:
            await self._write(send, one)

    async def _beat(self, send: Send) -> None:
        while True:
            silent_s = time.monotonic() - self._sent_at
            if silent_s >= self._keep_alive_s:
                await self._write(send, COMMENT)
            await asyncio.sleep(max(0.01, self._keep_alive_s - silent_s))

    async def _write(self, send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._sent_at = time.monotonic()


async def until_gone(receive: Receive, work: Awaitable[Value]) -> Value:
    """What `work` returns. Raises ReaderGone when the connection is closed before; it ends then.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ReaderGone
        return task.result()
    finally:
        await end(gone)
        await end(task)


async def end(task: asyncio.Future[Value] | None) -> None:
    """Cancel a task and wait for its end; its outcome is somebody else's."""
    if task is None or task.done():
        return
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Peeked:
    """A source whose first frame was awaited before anything was sent.

    What goes wrong until then is raised by `open`, while the response can still have a status.
    """

    def __init__(self, source: Frames) -> None:
        self._source = source
        self._first: asyncio.Future[bytes | None] | None = None

    @classmethod
    async def open(cls, source: Frames, wait_s: float) -> Peeked:
        """Wait for the first frame, at most `wait_s`. An error closes the source."""
        peeked = cls(source)
        peeked._first = asyncio.ensure_future(anext(source, None))
        try:
            await asyncio.wait((peeked._first,), timeout=wait_s)
            if peeked._first.done():
                peeked._first.result()
        except BaseException:
            await peeked.aclose()
            raise
        return peeked

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._first is None:
            return await anext(self._source)
        one = await self._first
        self._first = None
        if one is None:
            raise StopAsyncIteration
        return one

    async def aclose(self) -> None:
        """End the wait for the first frame, and the source."""
        await end(self._first)
        await self._source.aclose()
