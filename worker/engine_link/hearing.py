"""Frames of the engine process as they arrive, for whoever asks for all that have come.

A stream reader would keep the bytes and wake its caller to cut them: twice the calls, and this is
done in every step.

Invariant: frames are handed out once and in order; who hears nothing for long makes the engine
process wait, and no frame is dropped.
"""

from __future__ import annotations

import asyncio

from tokenfleet.worker.engine_link import frames

MOST_WAITING = 64
"""Frames that wait here; beyond, the socket holds the others, and the engine merges its steps."""


class Hearing(asyncio.Protocol):
    """The receiving end of one socket."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = frames.FrameBuffer()
        self._frames: list[frames.Frame] = []
        self._waiter: asyncio.Future[None] | None = None
        self._broken: ValueError | None = None
        """What came is no frame."""
        self._paused = False
        self.transport: asyncio.Transport
        self.ended = False
        """Whether the other end is closed."""
        self.closed = self._loop.create_future()
        """Done when this end is."""

    async def take(self) -> list[frames.Frame]:
        """All frames that have come, at least one; none when the other end is closed.

        Raises ValueError for what is no frame.
        """
        while not self._frames:
            if self._broken is not None:
                raise self._broken
            if self.ended:
                break
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._frames = self._frames, []
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return taken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]  # of a socket: it goes both ways

    def data_received(self, data: bytes) -> None:
        try:
            self._frames += self._buffer.feed(data)
        except ValueError as error:
            self._broken = error
        if len(self._frames) > MOST_WAITING and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self.ended = True
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.eof_received()
        if not self.closed.done():
            self.closed.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
