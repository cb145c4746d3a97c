"""One client's way to Redis: over which connections, how long it tries, what counts as unusable.

Whether a call may be repeated is known here, and repeating is bounded by a time; redis-py itself
never repeats one (dialing.py).

Invariant: a call that is not marked repeatable reaches the server at most once; a connection that
was closed opens nothing more.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import (
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from tokenfleet.producer.address import Address
from tokenfleet.producer.allowed import check_allowed
from tokenfleet.producer.checks import check_count, check_seconds
from tokenfleet.producer.dialing import hang_up, look_again
from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.forks import keep_for_parent
from tokenfleet.producer.given import Broker, Given
from tokenfleet.producer.greeting import check_greeting
from tokenfleet.producer.keys import Keys, check_name
from tokenfleet.producer.kinds import WRONG_TYPE, blame
from tokenfleet.producer.line import Lines
from tokenfleet.producer.mended import Door
from tokenfleet.producer.refusals import meaning_of, said, says_of_server
from tokenfleet.producer.scripts import Executor, Script
from tokenfleet.producer.turns import Turns

SOCKET_TIMEOUT_S = 5.0
"""Longest wait for a reply (less where connect_timeout_s is less). Blocking commands stay under."""

MOST_CALLS, MOST_WAITS = 64, 36
"""Connections in use at once to one server: by calls, and by commands that wait there. redis-py
opens no more than their sum."""

CLUSTER_PARTITIONS = 16
MOST_PARTITIONS = 16384
"""As many as a cluster has slots."""

_OFTEN, _WAITING = "often", "waiting"
_CLOSED = "the client was closed during a call"

_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4)


class Connection:
    """The clients of one process and event loop, made on first use."""

    def __init__(
        self,
        broker: Broker,
        *,
        namespace: str,
        partitions: int | None = None,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.namespace = check_name("namespace", namespace)
        self.connect_timeout_s = check_seconds("connect_timeout_s", connect_timeout_s)
        self._given = Given(broker)
        self.cluster = self._given.cluster
        self.announce = "SPUBLISH" if self.cluster else "PUBLISH"
        if partitions is None:
            partitions = CLUSTER_PARTITIONS if self.cluster else 1
        self.partitions = check_count("partitions", partitions, MOST_PARTITIONS)
        self._timeout_s = min(SOCKET_TIMEOUT_S, self.connect_timeout_s)
        self._client: Any = None
        self._lines = self._no_lines()
        """Of the scripts that run often, or that somebody waits for; of each wait at the server."""
        self._checked = False
        self._allowed: set[tuple[str, int]] = set()
        """Scripts that may be run whole, by partition; asked again after trouble."""
        self._door = Door()
        self._turns: dict[str, Turns] = {}
        """Of calls, by the server that they go to; of those that wait there, by `_WAITING`."""
        self._closed = False
        self._pid = os.getpid()
        keep_for_parent(self)

    @property
    def address(self) -> Address | None:
        """What the URL said; None for a client that was handed in."""
        return self._given.address

    def keys(self, partition: int) -> Keys:
        """The keys of one partition."""
        return Keys(self.namespace, partition)

    @property
    def client(self) -> Any:
        """The redis-py client, without retries of its own. Raises BrokerUnavailable when closed."""
        self._check_open()
        if self._client is None or self._pid != os.getpid():
            self._door, self._turns, self._lines = Door(), {}, self._no_lines()
            self._client = self._given.open(self._timeout_s, self._door)
            self._pid, self._checked = os.getpid(), False
            self._allowed.clear()
        return self._client

    async def ready(self) -> None:
        """Redis is there and new enough. Raises BrokerUnavailable, BrokerUnsupported."""
        client = self.client
        if not self._checked:
            check_greeting(await self.ask_server("HELLO"), self._given)
            self._checked = client is self._client

    async def run(
        self,
        script: Script,
        partition: int,
        keys: list[str],
        args: list[Any],
        *,
        patience_s: float,
        often: bool = False,
    ) -> Any:
        """Run a script. It is repeated on a lost connection for `patience_s`; 0: never.

        `often`: it runs often, or somebody waits for it: over a connection kept for such calls. A
        cluster's client knows which server a partition has moved to, so there they go through it
        as all others.

        Raises BrokerUnavailable, BrokerUnsupported; KeyOccupied where a key is not ours.
        """
        prefix = self.keys(partition).prefix

        async def once() -> Any:
            executor = self._kept(_OFTEN) if often else self.client
            if (script.name, partition) not in self._allowed:
                await self._check_allowed(executor, [script], partition, (keys or [prefix])[0])
            return await script.run(executor, keys, [prefix, self.announce, *args])

        try:
            return await self._persist(once, patience_s, server=self._server_of(partition))
        except ResponseError as error:
            raise await self._blamed(error, prefix, keys) from error

    async def check_allowed(self, scripts: Sequence[Script], partition: int, key: str) -> None:
        """Raises BrokerUnsupported, with what is missing, where the user may not run the scripts to
        their end. `run` asks the same before the first time of each."""

        async def once() -> None:
            await self._check_allowed(self.client, scripts, partition, key)

        await self._persist(once, self.connect_timeout_s, server=self._server_of(partition))

    async def _check_allowed(
        self, executor: Executor, scripts: Sequence[Script], partition: int, key: str
    ) -> None:
        prefix = self.keys(partition).prefix
        await check_allowed(executor, scripts, prefix, self.announce, key)
        self._allowed |= {(script.name, partition) for script in scripts}

    def _no_lines(self) -> Lines:
        return Lines(lambda: self.line_to(0))

    def _kept(self, name: str) -> Executor:
        client: Executor = self.client
        return client if self.cluster else self._lines.named(name)

    async def execute(self, *command: Any) -> Any:
        """Run a command that may be repeated, for as long as connect_timeout_s."""

        async def once() -> Any:
            return await self.client.execute_command(*command)

        try:
            return await self._persist(once, self.connect_timeout_s)
        except ResponseError as error:
            keys = [str(part) for part in command if str(part).startswith("{")]
            raise await self._blamed(error, self.namespace, keys) from error

    async def ask_server(self, *command: Any) -> Any:
        """Run a command about the server and not about a key; on a cluster, on one of its nodes."""

        async def once() -> Any:
            client = self.client
            if not self.cluster:
                return await client.execute_command(*command)
            await client.initialize()
            node = client.get_random_node()
            return await client.execute_command(*command, target_nodes=node)

        return await self._persist(once, self.connect_timeout_s)

    async def once(self, *command: Any, line: str) -> Any:
        """Run a command that is not repeated: one that blocks at the server. It has the connection
        kept under that name to itself; on a cluster, any of its client's."""

        async def call() -> Any:
            return await self._kept(line).execute_command(*command)

        return await self._persist(call, 0.0, server=_WAITING)

    async def run_behind(
        self,
        commands: Sequence[Sequence[Any]],
        script: Script,
        partition: int,
        keys: list[str],
        args: list[Any],
        *,
        line: str,
    ) -> list[Any]:
        """Run a script right after other commands, of which one waits at the server: all are sent
        at once, over the connection kept under that name. Not on a cluster. Nothing is repeated.

        Returns the replies; of the commands before it also what Redis refused, as exceptions.
        """
        prefix = self.keys(partition).prefix
        call = script.call(keys, [prefix, self.announce, *args])

        async def once() -> list[Any]:
            kept: Any = self._kept(line)
            if (script.name, partition) not in self._allowed:
                await self._check_allowed(kept, [script], partition, keys[0])
            replies: list[Any] = await kept.execute_together([*commands, call])
            if isinstance(replies[-1], Exception):
                raise replies[-1]
            return replies

        try:
            found: list[Any] = await self._persist(once, 0.0, server=_WAITING)
        except ResponseError as error:
            raise await self._blamed(error, prefix, keys) from error
        return found

    def node_of(self, partition: int) -> str:
        """Names the server that a partition lives on."""
        if not self.cluster:
            return ""
        return str(self.client.get_node_from_key(self.keys(partition).prefix).name)

    def _server_of(self, partition: int) -> str:
        """The same for the turns of calls: "" where it is not known, or not now."""
        if self._closed or self._client is None or self._pid != os.getpid():
            return ""
        try:
            return self.node_of(partition)
        except (RedisClusterException, RedisError, KeyError):
            return ""

    def line_to(self, partition: int) -> Any:
        """A redis-py connection of its own to that server, not yet connected, for pub/sub."""
        if not self.cluster:
            return self.client.connection_pool.make_connection()
        node = self.client.get_node_from_key(self.keys(partition).prefix)
        return node.connection_class(**node.connection_kwargs)

    async def locate(self, partition: int) -> None:
        """Find out anew where a partition lives, after it moved or its server was lost."""
        if self.cluster:  # a keyed command is sent on to the right server, and that is remembered
            key = self.keys(partition).workers
            await self._persist(lambda: self.client.execute_command("EXISTS", key), 0.0)

    async def _blamed(self, error: ResponseError, prefix: str, keys: list[str]) -> Exception:
        """The same error, or for a WRONGTYPE the one that names the key."""
        if WRONG_TYPE not in str(error):
            return error
        return await blame(keys, prefix, lambda key: self.execute("TYPE", key))

    async def aclose(self) -> None:
        """Close what was opened here, for good; a client that was handed in stays open."""
        client, self._client = self._client, None
        self._closed = True
        if self._pid != os.getpid():
            return
        for turns in self._turns.values():
            turns.close(_CLOSED)
        self._door.shut()  # whatever becomes of the rest: this may be cancelled
        await self._lines.hang_up()
        if client is not None and client is not self._given.broker:
            await hang_up(client)

    def _turns_at(self, server: str) -> Turns:
        client = self.client  # a forked child's turns are not those of its parent
        if server not in self._turns:
            pool = getattr(client, "connection_pool", None)
            most = getattr(pool, "max_connections", MOST_CALLS + MOST_WAITS)
            waits = min(MOST_WAITS, max(1, most // 3))
            calls = min(MOST_CALLS, max(1, most - waits))
            self._turns[server] = Turns(waits if server == _WAITING else calls)
        return self._turns[server]

    async def _persist(self, once: Any, patience_s: float, *, server: str = "") -> Any:
        give_up: float | None = None
        """Counted from when it is this call's turn."""
        tries = 0
        while True:
            try:
                async with self._turns_at(server).turn(patience_s or self._timeout_s):
                    give_up = give_up or time.monotonic() + patience_s
                    return await once()
            except (RedisError, RedisClusterException, OSError) as error:
                self._check_passing(error)
                if isinstance(error, ReadOnlyError):
                    await self._look_again()
                pause = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
                tries += 1
                if give_up is None or time.monotonic() + pause >= give_up:
                    raise self._unavailable(error, patience_s) from error
                await asyncio.sleep(pause)

    def _check_passing(self, error: Exception) -> None:
        """Return where the same call may succeed a moment later; else raise what it means."""
        meaning = meaning_of(error, self.describe(), self._given.doubt)
        if meaning is error:
            raise error
        self._allowed.clear()  # rights may have changed, or the server that we speak to
        if meaning is not None:
            raise meaning from error
        self._check_open()

    def _unavailable(self, error: Exception, patience_s: float) -> BrokerUnavailable:
        if says_of_server(error):
            return BrokerUnavailable(f"{self.describe()} refuses for now: {error}")
        return BrokerUnavailable(
            f"{self.describe()} was not reached within {patience_s:g} s ({said(error)}); "
            f"{self._given.doubt}"
        )

    def _check_open(self) -> None:
        """What was under way as we were closed, or comes later, opens nothing again."""
        if self._closed:
            raise BrokerUnavailable(f"{self.describe()}: {_CLOSED}")

    async def _look_again(self) -> None:
        await self._lines.hang_up()
        await look_again(self.client)

    def describe(self) -> str:
        """The server's address for messages, without the password."""
        return self._given.name


__all__ = ["Broker", "Connection", "RedisError", "ResponseError"]
