"""All streams of a client on one pub/sub connection (on a cluster: one per server).

Invariant: a channel is listened for on one line at a time, that of the server its partition lives
on as far as is known.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redis.exceptions import RedisClusterException

from tokenfleet.producer.channel_line import ChannelLine
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported
from tokenfleet.producer.forks import keep_for_parent
from tokenfleet.producer.subscription import CLOSED, Subscription


class Hub:
    """Subscribes streams to channels. Belongs to one event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lines: dict[str, ChannelLine] = {}
        self.closed = False
        keep_for_parent(self)

    async def subscribe(self, partition: int, channel: str) -> Subscription:
        """Returns when the server has confirmed. Raises BrokerUnavailable, and BrokerUnsupported
        where the server forbids the channel."""
        self.check_open()
        subscription = Subscription(partition, channel)
        try:
            line = self._line(partition)
        except RedisClusterException as error:  # its shard is without a master for now
            raise BrokerUnavailable(f"{self._connection.describe()}: {error}") from error
        try:
            async with asyncio.timeout(self._connection.connect_timeout_s):
                await line.add(subscription)
        except TimeoutError as error:
            await self.unsubscribe(subscription)
            raise BrokerUnavailable(
                f"{self._connection.describe()} did not confirm a subscription within "
                f"{self._connection.connect_timeout_s:g} s"
            ) from error
        except (asyncio.CancelledError, BrokerUnsupported):
            await self.unsubscribe(subscription)
            raise
        self.check_open()
        return subscription

    def check_open(self) -> None:
        """A stream that outlives its client opens nothing again. Raises BrokerUnavailable."""
        if self.closed:
            raise BrokerUnavailable(CLOSED)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Returns when the server no longer counts the subscriber, or cannot be asked."""
        subscription.close()
        if subscription.line is not None:
            await subscription.line.remove(subscription)

    def suspect(self, subscription: Subscription) -> None:
        """Something was logged and not heard: make the connection again."""
        if subscription.line is not None:
            subscription.line.drop()

    @property
    def num_lines(self) -> int:
        """Connections in use."""
        return len(self._lines)

    async def aclose(self) -> None:
        """Close the connections, for good; streams still open are told."""
        self.closed = True
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.end()  # all are told, whatever becomes of the waiting
        for line in lines:
            await line.ended()

    async def locate(self, partitions: set[int]) -> None:
        """Ask where partitions live now; those that cannot be found stay where they were."""
        for partition in partitions:
            with suppress(BrokerUnavailable):
                await self._connection.locate(partition)

    def home_of(self, partition: int) -> ChannelLine:
        """The line to the server that a partition lives on."""
        return self._line(partition)

    def _line(self, partition: int) -> ChannelLine:
        name = self._connection.node_of(partition)
        if name not in self._lines:
            command = "SSUBSCRIBE" if self._connection.cluster else "SUBSCRIBE"
            self._lines[name] = ChannelLine(self, self._connection.line_to, command)
        return self._lines[name]
