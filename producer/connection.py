"""One client's way to Redis: what it may be given, how long it tries, what counts as unusable.

The pools made here never retry inside redis-py: a re-sent XREADGROUP would claim jobs that nobody
reads. Whether a call may be repeated is known here, and repeating is bounded by a time.

Invariant: a call that is not marked repeatable reaches the server at most once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio as aio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
)

from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported, InvalidJob
from tokenfleet.producer.keys import Keys, check_name
from tokenfleet.producer.mended import mended
from tokenfleet.producer.scripts import Script

Broker = str | aio.Redis | aio.RedisCluster | redis.Redis
"""What a client may be given: a URL, or a redis-py client."""

SOCKET_TIMEOUT_S = 5.0
"""Longest wait for a reply (less where connect_timeout_s is less). Blocking commands stay under."""

CLUSTER_PARTITIONS = 16

_MINIMUM = {"redis": (7, 0), "valkey": (7, 2)}
_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4)
_PASSING = (
    *(ConnectionError, TimeoutError, ReadOnlyError, OSError),
    *(ClusterDownError, RedisClusterException),
)
_REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)
_CARRIED_OVER = frozenset(
    {"host", "port", "db", "username", "password", "path", "client_name", "credential_provider"}
    | {"encoding", "encoding_errors", "socket_keepalive", "socket_keepalive_options", "protocol"}
)


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
        self.connect_timeout_s = connect_timeout_s
        self.cluster = isinstance(broker, aio.RedisCluster)
        self.announce = "SPUBLISH" if self.cluster else "PUBLISH"
        self.partitions = partitions or (CLUSTER_PARTITIONS if self.cluster else 1)
        _refuse_decoding(broker)
        self._broker = broker
        self._client: Any = None
        self._checked = False
        self._pid = os.getpid()

    def keys(self, partition: int) -> Keys:
        """The keys of one partition."""
        return Keys(self.namespace, partition)

    @property
    def client(self) -> Any:
        """The redis-py client, without retries of its own."""
        if self._client is None or self._pid != os.getpid():
            self._client, self._pid, self._checked = self._make(), os.getpid(), False
        return self._client

    def _make(self) -> Any:
        return _client_for(self._broker, min(SOCKET_TIMEOUT_S, self.connect_timeout_s))

    async def ready(self) -> None:
        """Redis is there and new enough. Raises BrokerUnavailable, BrokerUnsupported."""
        client = self.client
        if not self._checked:
            if self.cluster:
                await self._persist(client.initialize, self.connect_timeout_s)
            reply = await self.execute("HELLO", **self._any_node())
            _check_version(_pairs(reply))
            self._checked = client is self._client

    async def run(
        self, script: Script, partition: int, keys: list[str], args: list[Any], *, patience_s: float
    ) -> Any:
        """Run a script. It is repeated on a lost connection for `patience_s`; 0: never."""
        prefix = self.keys(partition).prefix

        async def once() -> Any:
            return await script.run(self.client, keys, [prefix, self.announce, *args])

        return await self._persist(once, patience_s)

    async def execute(self, *command: Any, **options: Any) -> Any:
        """Run a command that may be repeated, for as long as connect_timeout_s."""

        async def once() -> Any:
            return await self.client.execute_command(*command, **options)

        return await self._persist(once, self.connect_timeout_s)

    async def once(self, *command: Any) -> Any:
        """Run a command that is not repeated: a blocking one, or one with effects that add up."""

        async def call() -> Any:
            return await self.client.execute_command(*command)

        return await self._persist(call, 0.0)

    def node_of(self, partition: int) -> str:
        """Names the server that a partition lives on."""
        if not self.cluster:
            return ""
        return str(self.client.get_node_from_key(self.keys(partition).prefix).name)

    def line_to(self, partition: int) -> Any:
        """A redis-py connection of its own to that server, not yet connected, for pub/sub."""
        if not self.cluster:
            return self.client.connection_pool.make_connection()
        node = self.client.get_node_from_key(self.keys(partition).prefix)
        return node.connection_class(**node.connection_kwargs)

    async def aclose(self) -> None:
        """Close what was opened here; a client that was handed in stays open."""
        client, self._client = self._client, None
        if client is not None and client is not self._broker and self._pid == os.getpid():
            await client.aclose(close_connection_pool=True)

    def _any_node(self) -> dict[str, Any]:
        return {"target_nodes": self.client.get_random_node()} if self.cluster else {}

    async def _persist(self, once: Any, patience_s: float) -> Any:
        give_up = time.monotonic() + patience_s
        tries = 0
        while True:
            try:
                return await once()
            except _REFUSALS as error:
                raise BrokerUnsupported(f"Redis refuses: {error}") from error
            except OutOfMemoryError as error:
                raise BrokerUnavailable(f"Redis is out of memory: {error}") from error
            except _PASSING as error:
                pause = _PAUSES_S[min(tries, len(_PAUSES_S) - 1)]
                tries += 1
                if time.monotonic() + pause >= give_up:
                    raise BrokerUnavailable(
                        f"{self.describe()} was not reached within {patience_s:g} s "
                        f"({error or type(error).__name__}); is it running, and the address right?"
                    ) from error
                await asyncio.sleep(pause)

    def describe(self) -> str:
        """The server's address for messages, without the password."""
        if isinstance(self._broker, str):
            parts = urlsplit(self._broker)
            port = f":{parts.port}" if parts.port else ""
            return f"Redis at {parts.scheme}://{parts.hostname or parts.path}{port}"
        return "Redis"


def _refuse_decoding(broker: Broker) -> None:
    if isinstance(broker, str):
        query = parse_qs(urlsplit(broker).query)
        wanted = query.get("decode_responses", ["false"])[-1].lower()
        decodes = wanted not in ("false", "0", "no", "")
    elif isinstance(broker, aio.Redis | aio.RedisCluster | redis.Redis):
        decodes = bool(broker.get_encoder().decode_responses)
    else:
        raise InvalidJob("redis_url", broker, "must be a redis:// URL or a redis-py client")
    if decodes:
        raise BrokerUnsupported(
            "a client with decode_responses cannot be used: jobs and events are bytes; "
            "leave decode_responses out"
        )


def _client_for(broker: Broker, timeout_s: float) -> Any:
    """A client of our own to the same server, or the one handed in where that cannot be made."""
    if isinstance(broker, aio.RedisCluster):
        return broker
    if isinstance(broker, str):
        pool = aio.ConnectionPool.from_url(broker, **_settings(timeout_s))
        pool.connection_kwargs.pop("decode_responses", None)
        pool.connection_class = mended(pool.connection_class)
        return aio.Redis.from_pool(pool)
    pool_class = type(broker.connection_pool)
    if pool_class.__name__ not in ("ConnectionPool", "BlockingConnectionPool"):
        if isinstance(broker, aio.Redis):
            return broker
        raise BrokerUnsupported(
            f"the blocking client cannot take over a {pool_class.__name__}; give it a redis:// URL"
        )
    return aio.Redis.from_pool(_pool_like(broker.connection_pool, timeout_s))


def _pool_like(pool: Any, timeout_s: float) -> aio.ConnectionPool:
    name = pool.connection_class.__name__
    kind: Any = aio.Connection
    if "SSL" in name:
        kind = aio.SSLConnection
    elif "Unix" in name:
        kind = aio.UnixDomainSocketConnection
    given: Mapping[str, Any] = pool.connection_kwargs
    carried = {
        key: value
        for key, value in given.items()
        if key in _CARRIED_OVER or (key.startswith("ssl_") and kind is aio.SSLConnection)
    }
    return aio.ConnectionPool(connection_class=mended(kind), **{**carried, **_settings(timeout_s)})


def _settings(timeout_s: float) -> dict[str, Any]:
    return {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
    }


def _pairs(reply: Any) -> dict[str, Any]:
    """HELLO's reply as a dict, from RESP2's flat list or RESP3's map."""
    if not isinstance(reply, dict):
        reply = dict(zip(reply[::2], reply[1::2]))
    return {_text(key): value for key, value in reply.items()}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_version(hello: Mapping[str, Any]) -> None:
    server, version = _text(hello["server"]), _text(hello["version"])
    needed = _MINIMUM.get(server, _MINIMUM["redis"])
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < needed:
        wanted = ".".join(map(str, needed))
        raise BrokerUnsupported(
            f"{server} {version} is too old: tokenfleet needs Redis >= 7.0 or Valkey >= 7.2 "
            f"(here {server} >= {wanted})"
        )


__all__ = ["Broker", "Connection", "RedisError", "ResponseError"]
