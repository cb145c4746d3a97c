"""One connection kept for calls that are made many times a second, or that somebody waits for.

redis-py's client takes a connection out of its pool for each command, looks whether it is still
good, reads through a stream and keeps count of what it does: in a worker's flush that costs more
than to send and to receive. Here redis-py connects and says who we are, and then its transport
answers to us. Calls made at once follow each other on it, and each has its reply as it comes.

Invariant: a reply is read by the call that it answers. That of a call that was broken off is
dropped; where no other call waits behind it, the connection is closed instead, and the next call
opens another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, TimeoutError

from tokenfleet.producer.patience import Patience
from tokenfleet.producer.takeover import Takeover

WAIT_S = 5.0
"""How long a reply is waited for where the connection's settings name no time."""


class Line:
    """Such a connection, opened by its first call. It repeats nothing.

    Args:
        make: a redis-py connection, not yet connected.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._replies: _Replies | None = None
        self._hang_ups = 0
        self._opening = asyncio.Lock()

    async def execute_command(self, *args: Any, **_options: Any) -> Any:
        """Send one command and return its reply; raises what redis-py's client raises."""
        (reply,) = await self.execute_together([args])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def execute_together(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands at once; their replies. What Redis refuses is one too, as an exception that
        is not raised."""
        replies = self._replies
        if replies is None or not replies.open:
            replies = await self._opened()
        parts = [part for args in commands for part in replies.wire.pack_command(*args)]
        waiters = [replies.expect() for _ in commands]
        try:
            replies.transport.writelines(parts)
            return [await waiter for waiter in waiters]
        except asyncio.CancelledError:
            for waiter in waiters:
                waiter.cancel()
            if not replies.awaited:
                await self._drop(replies)
            raise
        except BaseException:
            for waiter in waiters:  # all have failed with the first
                if waiter.done() and not waiter.cancelled():
                    waiter.exception()
            await self._drop(replies)
            raise

    async def hang_up(self) -> None:
        """Close the connection; calls under way fail, and the next one opens another."""
        replies, self._replies = self._replies, None
        self._hang_ups += 1
        if replies is not None:
            replies.transport.abort()  # a server that reads no more would never let it be closed
            await replies.wire.disconnect(nowait=True)

    async def _drop(self, replies: _Replies) -> None:
        """Close this connection, unless another one is there already."""
        if self._replies is replies:
            await self.hang_up()

    async def _opened(self) -> _Replies:
        async with self._opening:
            replies = self._replies
            if replies is None or not replies.open:
                replies = await self._connect()
            return replies

    async def _connect(self) -> _Replies:
        await self.hang_up()
        wire, hang_ups = self._make(), self._hang_ups
        try:
            await wire.connect()
            if self._hang_ups != hang_ups:
                raise ConnectionError("Connection closed while it was made")
        except BaseException:
            await wire.disconnect(nowait=True)
            raise
        self._replies = _Replies(wire)
        return self._replies


class Lines:
    """The lines of one client to one server, each for one kind of calls and opened by its first.

    Args:
        make: as for a Line.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lines: dict[str, Line] = {}

    def named(self, name: str) -> Line:
        """The line of that name."""
        if name not in self._lines:
            self._lines[name] = Line(self._make)
        return self._lines[name]

    async def hang_up(self) -> None:
        """Close all of them, as Line does."""
        for line in list(self._lines.values()):
            await line.hang_up()


class _Replies(Takeover):
    """Hands the replies that come over a redis-py connection, from now on, to who waits for one."""

    def __init__(self, wire: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiters: deque[asyncio.Future[Any]] = deque()
        """In the order of their calls, those broken off included."""
        self._patience = Patience(self._too_late)
        super().__init__(wire)

    def expect(self) -> asyncio.Future[Any]:
        """The next reply behind those expected before. What Redis refuses is one too, as an
        exception that is not raised."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        if len(self._waiters) == 1:
            self._begin_waiting()
        return waiter

    @property
    def awaited(self) -> bool:
        """Whether a call waits that was not broken off."""
        return not all(waiter.done() for waiter in self._waiters)

    def take(self, reply: Any) -> None:
        if not self._waiters or isinstance(reply, hiredis.PushNotification):
            return
        waiter = self._waiters.popleft()
        if not waiter.done():
            waiter.set_result(reply)
        if self._waiters:  # a server that answers is waited for
            self._begin_waiting()

    def fail(self, error: Exception) -> None:
        """No more replies are taken: none of them would be that of the call it is given to."""
        super().fail(error)
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._patience.end()
        super().connection_lost(error)

    def _begin_waiting(self) -> None:
        self._patience.begin(self.wire.socket_timeout or WAIT_S)

    def _too_late(self) -> None:
        """The last call's time is up; where its reply has come, nothing is wrong."""
        if self._waiters:
            self.fail(TimeoutError("Timeout reading from socket"))
