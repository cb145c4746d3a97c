"""One stream's ear on one channel: what came and was not asked for yet.

Invariant: between two `REREAD` marks of a subscription, no message of its channel is missing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.patience import Patience

if TYPE_CHECKING:
    from tokenfleet.producer.channel_line import ChannelLine

MOST_WAITING = 1000
"""Messages kept for a slow subscriber; beyond, it reads the log instead."""

CLOSED = "the client was closed"


class Reread:
    """The mark: what came before may have holes, the log has everything."""


REREAD: Final = Reread()


class Subscription:
    """One stream's ear on one channel."""

    def __init__(self, partition: int, channel: str) -> None:
        self.partition = partition
        self.channel = channel
        self.line: ChannelLine | None = None
        """Who listens for it; changed by the lines alone."""
        self._messages: deque[bytes | Reread] = deque()
        self._waiter: asyncio.Future[None] | None = None
        """Of the `get` that waits; there is one at most."""
        self._patience = Patience(self._wake)
        self._cut = False

    def push(self, message: bytes) -> None:
        """A message came."""
        if len(self._messages) >= MOST_WAITING:
            self.mark()
        else:
            self._messages.append(message)
            self._wake()

    def mark(self) -> None:
        """Forget what waits; the log is to be read."""
        self._messages.clear()
        self._messages.append(REREAD)
        self._wake()

    def forget(self) -> None:
        """Drop what waits: whoever reads the log from here on finds it there."""
        self._messages.clear()

    async def get(self, timeout_s: float) -> bytes | Reread | None:
        """The next message or mark; None after `timeout_s` of silence.

        Raises BrokerUnavailable when the client was closed.
        """
        if not self._messages and not self._cut:
            self._waiter = asyncio.get_running_loop().create_future()
            self._patience.begin(timeout_s)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._cut and not self._messages:
            raise BrokerUnavailable(CLOSED)
        return self._messages.popleft() if self._messages else None

    def cut_off(self) -> None:
        """The client was closed: whoever waits is told."""
        self._cut = True
        self._wake()

    def close(self) -> None:
        """Nobody will ask any more."""
        self._patience.end()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
