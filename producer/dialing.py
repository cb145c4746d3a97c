"""Makes the redis-py client for an address, or one like a client that was handed in.

None of them retries inside redis-py: a re-sent XREADGROUP would claim jobs that nobody reads.
Whether a call may be repeated is known in connection.py.

Invariant: a client made here opens connections of its own; one that was handed in lends it its
address and credentials, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import redis
import redis.asyncio as aio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff

from tokenfleet.producer.address import CLUSTER, SENTINEL, UNIX, Address
from tokenfleet.producer.clustering import Cluster, staying
from tokenfleet.producer.errors import BrokerUnsupported
from tokenfleet.producer.mended import Door, mended

_CARRIED_OVER = frozenset(
    {"host", "port", "db", "username", "password", "path", "client_name", "credential_provider"}
    | {"encoding", "encoding_errors", "socket_keepalive", "socket_keepalive_options", "protocol"}
)
_NOT_OF_A_CLUSTER = frozenset({"host", "port", "db", "path"})


class _Sentinels(Sentinel):
    """Never loses one of those that it asks.

    redis-py moves the one that answers to the front of its list; when two calls do so at once, one
    sentinel stands there twice and another not at all: never asked again, and never closed.
    """

    def __init__(self, hosts: list[tuple[str, int]], asking: dict[str, Any], door: Door) -> None:
        super().__init__(hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]  # theirs
        self._all = tuple(self.sentinels)
        for sentinel in self._all:
            pool = sentinel.connection_pool
            pool.connection_class = mended(pool.connection_class, door)

    async def discover_master(self, service_name: str) -> Any:
        if len(set(map(id, self.sentinels))) < len(self._all):
            self.sentinels = list(self._all)
        return await super().discover_master(service_name)

    async def aclose(self) -> None:
        self.sentinels = list(self._all)
        await super().aclose()


def dial(address: Address, timeout_s: float, door: Door) -> Any:
    """A client for an address, not connected yet; each reply is waited for `timeout_s`. Its
    connections go through the door."""
    if address.kind == CLUSTER:
        return _cluster(address.hosts, {**address.options, "ssl": address.tls}, timeout_s, door)
    if address.kind == SENTINEL:
        return _by_sentinel(address, timeout_s, door)
    options = {**address.options, **_settings(timeout_s)}
    kind: Any = aio.SSLConnection if address.tls else aio.Connection
    if address.kind == UNIX:
        kind, options = aio.UnixDomainSocketConnection, {**options, "path": address.path}
    else:
        options["host"], options["port"] = address.hosts[0]
    return aio.Redis.from_pool(aio.ConnectionPool(connection_class=mended(kind, door), **options))


def dial_like(
    given: aio.Redis | aio.RedisCluster | redis.Redis, timeout_s: float, door: Door
) -> Any:
    """A client of our own to the same server, or the one handed in where that cannot be made."""
    if isinstance(given, aio.RedisCluster):
        return _cluster_like(given, timeout_s, door)
    pool_class = type(given.connection_pool)
    if pool_class.__name__ not in ("ConnectionPool", "BlockingConnectionPool"):
        if isinstance(given, aio.Redis):
            return given
        raise BrokerUnsupported(
            f"the blocking client cannot take over a {pool_class.__name__}; give it a redis:// URL"
        )
    return aio.Redis.from_pool(_pool_like(given.connection_pool, timeout_s, door))


async def hang_up(client: Any) -> None:
    """Close a client made here, and what it asked for the way."""
    if isinstance(client, Cluster):
        await client.hang_up()
        return
    await client.aclose(close_connection_pool=True)
    if isinstance(client.connection_pool, SentinelConnectionPool):
        await client.connection_pool.sentinel_manager.aclose()


async def look_again(client: Any) -> None:
    """Drop idle connections: the server behind them is not the master any more, its name may
    lead to the new one by now."""
    if not isinstance(client, aio.RedisCluster):
        await client.connection_pool.disconnect(inuse_connections=False)


def _by_sentinel(address: Address, timeout_s: float, door: Door) -> aio.Redis:
    kind: Any = SentinelManagedSSLConnection if address.tls else SentinelManagedConnection
    asking = {**address.sentinel_options, **_settings(timeout_s)}
    if address.tls:
        asking["ssl"] = True
    sentinel = _Sentinels(list(address.hosts), asking, door)
    pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]  # the same
        address.service,
        sentinel,
        connection_class=mended(kind, door),
        **{**address.options, **_settings(timeout_s)},
    )
    return aio.Redis.from_pool(pool)


def _cluster(hosts: Any, options: Mapping[str, Any], timeout_s: float, door: Door) -> Cluster:
    client = Cluster(
        startup_nodes=[ClusterNode(host, port) for host, port in hosts],
        require_full_coverage=False,  # a shard that fails over is no reason to give up the others
        **{**options, **_settings(timeout_s)},
    )
    kwargs: dict[str, Any] = client.connection_kwargs  # of the nodes that it will find
    kwargs["connection_class"] = staying(mended(kwargs["connection_class"], door))
    for node in client.startup_nodes:
        node.connection_class = kwargs["connection_class"]
    return client


def _cluster_like(given: aio.RedisCluster, timeout_s: float, door: Door) -> Cluster:
    nodes = given.nodes_manager
    hosts = [(node.host, int(node.port)) for node in nodes.startup_nodes.values()]
    theirs = given.connection_kwargs
    options = _carried(theirs, tls="SSL" in theirs["connection_class"].__name__)
    options = {k: v for k, v in options.items() if k not in _NOT_OF_A_CLUSTER}
    options["ssl"] = "SSL" in theirs["connection_class"].__name__
    options["address_remap"] = nodes.address_remap
    return _cluster(hosts, options, timeout_s, door)


def _pool_like(pool: Any, timeout_s: float, door: Door) -> aio.ConnectionPool:
    name = pool.connection_class.__name__
    kind: Any = aio.Connection
    if "SSL" in name:
        kind = aio.SSLConnection
    elif "Unix" in name:
        kind = aio.UnixDomainSocketConnection
    options = _carried(pool.connection_kwargs, tls=kind is aio.SSLConnection)
    return aio.ConnectionPool(
        connection_class=mended(kind, door), **{**options, **_settings(timeout_s)}
    )


def _carried(theirs: Mapping[str, Any], *, tls: bool) -> dict[str, Any]:
    return {
        key: value
        for key, value in theirs.items()
        if key in _CARRIED_OVER or (key.startswith("ssl_") and tls)
    }


def _settings(timeout_s: float) -> dict[str, Any]:
    return {
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        **_driver(),
    }


@cache
def _driver() -> dict[str, Any]:
    """Who we say that we are: redis-py, which otherwise reads its own version from a file for each
    connection that it makes (0.7 ms). Older ones take no such word."""
    try:
        from redis.driver_info import DriverInfo
    except ImportError:
        return {}
    return {"driver_info": DriverInfo()}
