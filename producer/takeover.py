"""A redis-py connection whose transport answers to us.

redis-py connects and says who we are. Then what arrives is parsed where it arrives, without a
stream, a task that reads it, and a dozen calls for each reply: workers and readers do this for
every flush.

Invariant: once it is not `open`, nothing that arrives is handed on.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, InvalidResponse

_PART = object()
"""What hiredis says while a reply has not come whole."""


class Takeover(ABC, asyncio.Protocol):
    """Takes over a connection that has no call under way.

    Args:
        wire: a redis-py connection, connected.
    """

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
        self.transport.set_protocol(self)

    @abstractmethod
    def take(self, reply: Any) -> None:
        """A whole reply came. What Redis refuses is one too, as an exception."""

    def fail(self, error: Exception) -> None:
        """The connection is lost, or of no use any more."""
        self.open = False
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the transport."""
        if not self.open:
            return
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _PART:
                self.take(reply)
        except InvalidResponse as error:
            self.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the transport, as its last call."""
        self.fail(ConnectionError(f"Connection closed by server: {error or 'no reason given'}"))
        self._before.connection_lost(error)
