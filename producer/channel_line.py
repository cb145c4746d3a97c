"""One connection in subscriber mode, kept up by a task.

A lost connection is made again and everything subscribed again. Messages that passed meanwhile are
gone; so every (re)subscription tells its streams to read the log again, once it is confirmed.

On a cluster a channel lives where its partition does. When that moves (a failover, slots given to
another server), a line that reconnects hands such channels over to the line of their new home.

Invariant: a subscription that listens here has been marked since its channel was last confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from redis.exceptions import NoPermissionError, RedisClusterException, RedisError

from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported
from tokenfleet.producer.subscription import Subscription
from tokenfleet.producer.takeover import Takeover

_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.3)


class Homes(Protocol):
    """Knows where partitions live: the hub."""

    async def locate(self, partitions: set[int]) -> None:
        """Ask where they live now; those that cannot be found stay where they were."""

    def home_of(self, partition: int) -> ChannelLine:
        """The line to the server that a partition lives on."""


class ChannelLine:
    """Subscribes and hears.

    Args:
        homes: who knows where partitions live.
        make: a redis-py connection to the server of a partition, not yet connected.
        command: SUBSCRIBE, or SSUBSCRIBE on a cluster.
    """

    def __init__(self, homes: Homes, make: Callable[[int], Any], command: str) -> None:
        self._homes = homes
        self._make = make
        self._command = command
        self._sharded = command.startswith("SS")
        self._prefix = b"s" if self._sharded else b""
        self._message = self._prefix + b"message"
        self._ears: dict[bytes, set[Subscription]] = {}
        self._confirmed: dict[bytes, asyncio.Event] = {}
        self._gone: dict[bytes, asyncio.Event] = {}
        self._wanted = asyncio.Event()
        self._losses = 0
        """In a row, without a confirmation between them."""
        self._forbidden: NoPermissionError | None = None
        """Why the last connection could subscribe to nothing."""
        self._unsaid: dict[int, list[str]] = {}
        """By partition: channels that are to be subscribed to in the next turn of the loop."""
        self._wire: _Wire | None = None
        self._task: asyncio.Task[None] | None = None

    async def add(self, subscription: Subscription) -> None:
        """Listen, and return once the server has confirmed."""
        channel = subscription.channel.encode()
        self._ears.setdefault(channel, set()).add(subscription)
        subscription.line = self
        self._begin()
        confirmed = self._confirmed.get(channel)
        if confirmed is None:
            confirmed = self._confirmed[channel] = asyncio.Event()
            self._say_soon(subscription)
        await confirmed.wait()
        if self._forbidden is not None:
            raise BrokerUnsupported(
                f"Redis refuses a channel: {self._forbidden}; "
                "`tokenfleet acl` prints the rights it needs"
            )

    async def take_over(
        self, channel: bytes, ears: set[Subscription], confirmed: asyncio.Event
    ) -> None:
        """Listen for subscriptions whose channel has moved here."""
        self._ears.setdefault(channel, set()).update(ears)
        for subscription in ears:
            subscription.line = self
        waiting = self._confirmed.setdefault(channel, confirmed)
        self._begin()
        if waiting is confirmed:
            self._say(self._command, channel.decode())
        else:
            confirmed.set()  # whoever waited reads the log, and again when this line is confirmed

    def _begin(self) -> None:
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="tokenfleet-hub")

    async def remove(self, subscription: Subscription) -> None:
        """Stop listening; the last one on a channel leaves it on the server too."""
        channel = subscription.channel.encode()
        ears = self._ears.get(channel, set())
        ears.discard(subscription)
        if ears or channel not in self._ears:
            return
        del self._ears[channel]
        self._confirmed.pop(channel, None)
        if subscription.channel in (unsaid := self._unsaid.get(subscription.partition, [])):
            unsaid.remove(subscription.channel)
            return
        gone = self._gone[channel] = asyncio.Event()
        if self._say(self._command.replace("SUB", "UNSUB"), subscription.channel):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await gone.wait()
        self._gone.pop(channel, None)

    def drop(self) -> None:
        """Cut the connection; the task makes it again."""
        if self._wire is not None:
            self._wire.transport.abort()

    def end(self) -> None:
        """Tell all who listen, and begin to end the task and the connection."""
        if self._task is not None:
            self._task.cancel()
        self._tell()

    def _tell(self) -> None:
        for ears in self._ears.values():
            for subscription in ears:
                subscription.cut_off()
        self._wake_all()  # whoever waits for a confirmation finds the hub closed

    def _wake_all(self) -> None:
        for confirmed in self._confirmed.values():
            confirmed.set()

    async def ended(self) -> None:
        """Return when they have ended."""
        task, self._task = self._task, None
        while task is not None and not task.done():
            await asyncio.wait([task], timeout=0.1)
            task.cancel()  # more than once: redis-py may lose a cancel while it connects

    def _say_soon(self, subscription: Subscription) -> None:
        """Streams that are joined at once are asked for together: one command a partition, whose
        channels share a slot."""
        if not self._unsaid:
            asyncio.get_running_loop().call_soon(self._say_all)
        self._unsaid.setdefault(subscription.partition, []).append(subscription.channel)

    def _say_all(self) -> None:
        while self._unsaid:
            _, channels = self._unsaid.popitem()
            if channels:
                self._say(self._command, *channels)

    def _say(self, command: str, *channels: str) -> bool:
        """Send when connected. What cannot be sent now is made good by the next connection."""
        if self._wire is None or not self._wire.open:
            return False
        self._wire.say(command, *channels)
        return True

    async def _run(self) -> None:
        """Connect, subscribe, listen; on any loss once more, for ever."""
        while True:
            try:
                await self._listen(self._make(await self._partition()))
            except (RedisError, RedisClusterException, OSError) as error:
                # the reason is not lost: whoever waits meets it on the command connection
                if isinstance(error, NoPermissionError):  # but for this one
                    self._forbidden = error
                    self._wake_all()
                await asyncio.sleep(_PAUSES_S[min(self._losses, len(_PAUSES_S) - 1)])
                self._losses += 1
            except BrokerUnavailable:  # our connection was closed, and makes no more of them
                self._tell()
                return

    async def _listen(self, wire: Any) -> None:
        """One connection, from its making to its loss."""
        try:
            await wire.connect()
            self._wire = _Wire(wire, self)
            self._unsaid.clear()
            for channel in list(self._ears):
                self._say(self._command, channel.decode())
            await self._wire.lost  # silence is no fault here
        finally:
            if self._wire is not None:
                self._wire.lost.cancel()
                self._wire = None
            for event in self._confirmed.values():
                event.clear()
            for event in self._gone.values():
                event.set()
            await wire.disconnect(nowait=True)

    async def _partition(self) -> int:
        """One whose server this line is for; waits until there is one."""
        while True:
            if self._sharded and self._losses:
                ears = [ear for found in self._ears.values() for ear in found]
                await self._homes.locate({ear.partition for ear in ears})
                await self._hand_over_strays()
            for found in self._ears.values():
                return next(iter(found)).partition
            self._wanted.clear()
            await self._wanted.wait()

    async def _hand_over_strays(self) -> None:
        """Give channels whose partition lives elsewhere now to the line of their home."""
        for channel, ears in list(self._ears.items()):
            home = self._homes.home_of(next(iter(ears)).partition)
            if home is not self:
                del self._ears[channel]
                confirmed = self._confirmed.pop(channel)
                confirmed.clear()
                await home.take_over(channel, ears, confirmed)

    def hear(self, reply: Any) -> None:
        """Something came over the connection."""
        if not isinstance(reply, list) or len(reply) != 3:
            return
        kind, channel, body = reply
        if kind == self._message:
            for subscription in self._ears.get(channel, ()):
                subscription.push(body)
        elif kind == self._prefix + b"subscribe":
            self._losses, self._forbidden = 0, None
            for subscription in self._ears.get(channel, ()):
                subscription.mark()
            if channel in self._confirmed:
                self._confirmed[channel].set()
        elif kind == self._prefix + b"unsubscribe":
            if channel in self._gone:
                self._gone[channel].set()
            elif channel in self._ears and self._confirmed[channel].is_set():
                self.drop()  # the slot moved to another server


class _Wire(Takeover):
    """A redis-py connection in subscriber mode."""

    def __init__(self, wire: Any, line: ChannelLine) -> None:
        self._line = line
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Never a result; an exception once the connection is gone."""
        super().__init__(wire)

    def say(self, *command: str) -> None:
        """Send, or leave it: what is lost with the connection is said again on the next one."""
        if not self.transport.is_closing():
            self.transport.writelines(self.wire.pack_command(*command))

    def take(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            self.fail(reply)
        else:
            self._line.hear(reply)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        if not self.lost.done():
            self.lost.set_exception(error)
