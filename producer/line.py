"""One connection kept for a call that is made many times a second.

redis-py's client takes a connection out of its pool for each command, looks whether it is still
good, reads through a stream and keeps count of what it does: in a worker's flush that costs more
than to send and to receive. Here redis-py connects and says who we are, and then its transport
answers to us.

Invariant: a reply is read by the call that it answers: a connection on which a call was broken off
is closed, and the next call opens another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, InvalidResponse, TimeoutError

from tokenfleet.producer.patience import Patience

WAIT_S = 5.0
"""How long a reply is waited for where the connection's settings name no time."""

_PART = object()
"""What hiredis says while a reply has not come whole."""


class Line:
    """Such a connection, opened by its first call. It repeats nothing.

    Args:
        make: a redis-py connection, not yet connected.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._replies: _Replies | None = None
        self._hang_ups = 0
        self.busy = False
        """Whether a call is under way: another one has to go another way."""

    async def execute_command(self, *args: Any, **_options: Any) -> Any:
        """Send one command and return its reply; raises what redis-py's client raises."""
        assert not self.busy
        self.busy = True
        try:
            replies = self._replies
            if replies is None or not replies.open:
                replies = await self._connect()
            waiter = replies.expect()
            replies.transport.writelines(replies.wire.pack_command(*args))
            reply = await waiter
        except BaseException:
            await self.hang_up()
            raise
        finally:
            self.busy = False
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def hang_up(self) -> None:
        """Close the connection; the next call opens another."""
        replies, self._replies = self._replies, None
        self._hang_ups += 1
        if replies is not None:
            replies.transport.abort()  # a server that reads no more would never let it be closed
            await replies.wire.disconnect(nowait=True)

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


class _Replies(asyncio.Protocol):
    """Hands the replies that come over a redis-py connection, from now on, to who waits for one."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire
        self.transport: asyncio.Transport = wire._writer.transport
        self.open = not self.transport.is_closing()
        self._before = self.transport.get_protocol()
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=wire._parser.parse_error,
            notEnoughData=_PART,
        )
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[Any] | None = None
        self._patience = Patience(self._too_late)
        self.transport.set_protocol(self)

    def expect(self) -> asyncio.Future[Any]:
        """The next reply. What Redis refuses is one too, as an exception that is not raised."""
        self._waiter = waiter = self._loop.create_future()
        self._patience.begin(self.wire.socket_timeout or WAIT_S)
        return waiter

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            reply = self._reader.gets()
            while isinstance(reply, hiredis.PushNotification):
                reply = self._reader.gets()
        except InvalidResponse as error:
            return self._fail(error)
        waiter = self._waiter
        if reply is not _PART and waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(reply)
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._patience.end()
        self._fail(ConnectionError(f"Connection closed by server: {error or 'no reason given'}"))
        self._before.connection_lost(error)

    def _too_late(self) -> None:
        self._fail(TimeoutError("Timeout reading from socket"))

    def _fail(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
