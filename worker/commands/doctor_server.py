"""Is this Redis fit to hold jobs: version, speed, scripts, memory, files, copies, clock, locks.

Everything here reads. What a user may not ask is a warning, not a failure.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from redis.exceptions import ResponseError

from tokenfleet.producer.address import UNIX
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnsupported
from tokenfleet.producer.fleet_view import text_of, texts_of
from tokenfleet.producer.keys import new_job_id
from tokenfleet.producer.scripts import READ
from tokenfleet.worker.commands.findings import BAD, GOOD, WARN, Finding

SLOW_MS = 20.0
SKEW_S = 2.0
MEMORY_SHARE = 0.8
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_REFUSED = (ResponseError, BrokerUnsupported)


class ServerChecks:
    """Examines the server, or the nodes of a cluster."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def version(self) -> list[Finding]:
        hello = texts_of(await self._connection.ask_server("HELLO"))
        found = f"{hello['server']} {hello['version']}, {hello.get('mode', 'standalone')}"
        try:
            await self._connection.ready()
        except BrokerUnsupported as error:
            return [Finding("version", BAD, found, str(error))]
        return [Finding("version", GOOD, found)]

    async def latency(self) -> list[Finding]:
        """The median: one moment in which this machine was busy says nothing of the way there."""
        await self._connection.ask_server("PING")
        trips = []
        for _ in range(21):
            started = time.perf_counter()
            await self._connection.ask_server("PING")
            trips.append(time.perf_counter() - started)
        each_ms = statistics.median(trips) * 1000
        found = f"{each_ms:.2f} ms a round trip"
        if each_ms > SLOW_MS:
            return [Finding("latency", WARN, found, "move workers nearer: flushes wait for it")]
        return [Finding("latency", GOOD, found)]

    async def scripts(self) -> list[Finding]:
        """A real one, that asks for a job which is not there, in every partition."""
        try:
            for partition in range(self._connection.partitions):
                names, job_id = self._connection.keys(partition), new_job_id(partition)
                keys = [names.job(job_id), names.events(job_id)]
                args = [job_id, "0-0", 1, 0, 1000, 1000, 1]
                await self._connection.run(READ, partition, keys, args, patience_s=10.0)
        except _REFUSED as error:
            advice = "give this user the rights that `tokenfleet acl` prints"
            return [Finding("scripts", BAD, str(error), advice)]
        return [Finding("scripts", GOOD, "Lua runs, with the rights it needs")]

    async def access(self) -> list[Finding]:
        user = await self._text("ACL", "WHOAMI")
        if user is None:
            return [Finding("access", GOOD, "a user that may not ask who it is")]
        if user == "default" and self._far and not self._has_password:
            advice = (
                "set a password or ACL users: `tokenfleet acl producer`, `tokenfleet acl worker`"
            )
            return [Finding("access", WARN, "anybody who reaches the port may do anything", advice)]
        return [Finding("access", GOOD, f"user {user}")]

    async def encryption(self) -> list[Finding]:
        address = self._connection.address
        if address is not None and address.tls:
            return [Finding("encryption", GOOD, "TLS")]
        if not self._far:
            return [Finding("encryption", GOOD, "none, on this machine")]
        advice = "use rediss://, or a network that you trust: prompts and tokens cross it"
        return [Finding("encryption", WARN, "none", advice)]

    async def memory(self) -> list[Finding]:
        policy, limit = await self._config("maxmemory-policy"), await self._config("maxmemory")
        if policy is None:
            return [Finding("memory", WARN, "not allowed to ask", "make sure it is noeviction")]
        found = f"maxmemory-policy {policy}, maxmemory {limit or 0}"
        if policy != "noeviction":
            advice = "CONFIG SET maxmemory-policy noeviction: this one may drop jobs"
            return [Finding("memory", BAD if limit not in (None, "0") else WARN, found, advice)]
        used, most = int((await self._info("memory")).get("used_memory", 0)), int(limit or 0)
        if most and used > MEMORY_SHARE * most:
            advice = "raise maxmemory, or shorten result_ttl_s: a full Redis takes no jobs"
            return [Finding("memory", WARN, f"{found}, {used / most:.0%} of it used", advice)]
        return [Finding("memory", GOOD, found)]

    async def persistence(self) -> list[Finding]:
        aof = await self._config("appendonly")
        if aof is None:
            return [Finding("persistence", WARN, "not allowed to ask", "make sure AOF is on")]
        if aof != "yes":
            advice = "CONFIG SET appendonly yes: without it a restart forgets every job"
            return [Finding("persistence", WARN, "append-only file off", advice)]
        if (await self._info("persistence")).get("aof_last_write_status", "ok") != "ok":
            advice = "look at the server's disk: nothing that is accepted now survives a restart"
            return [Finding("persistence", BAD, "the append-only file cannot be written", advice)]
        sync = await self._config("appendfsync")
        return [Finding("persistence", GOOD, f"append-only file on, fsync {sync}")]

    async def copies(self) -> list[Finding]:
        """Replication of one server; the state of a cluster."""
        if self._connection.cluster:
            return await self._cluster()
        info = await self._info("replication")
        if info.get("role") == "slave":
            advice = "give the master's address, or the sentinels': nothing can be written here"
            return [Finding("copies", BAD, "this is a replica", advice)]
        count = int(info.get("connected_slaves", 0))
        found = f"{count} replica(s)"
        if count and (await self._config("min-replicas-to-write")) == "0":
            advice = "min-replicas-to-write 1 bounds what a failover can lose"
            return [Finding("copies", GOOD, f"{found}; writes wait for none of them", advice)]
        return [Finding("copies", GOOD, found)]

    async def _cluster(self) -> list[Finding]:
        said = text_of(await self._connection.ask_server("CLUSTER", "INFO"))
        info = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
        found = f"cluster {info.get('cluster_state')}, {info.get('cluster_size')} masters"
        if info.get("cluster_state") != "ok":
            advice = "redis-cli --cluster check: jobs in partitions without a master stand still"
            return [Finding("copies", BAD, found, advice)]
        nodes = text_of(await self._connection.ask_server("CLUSTER", "NODES")).splitlines()
        followed = {line.split()[3] for line in nodes}
        alone = [
            line.split()[1].partition("@")[0]
            for line in nodes
            if "master" in line.split()[2] and line.split()[0] not in followed
        ]
        if alone:
            advice = "give each master a replica, or its jobs stand still when it dies"
            return [Finding("copies", WARN, f"{found}; no replica of {', '.join(alone)}", advice)]
        return [Finding("copies", GOOD, f"{found}, each with a replica")]

    async def clock(self) -> list[Finding]:
        """A time between our question and its answer is right, however long the answer took."""
        before = time.time()
        seconds, micros = await self._connection.ask_server("TIME")
        theirs = int(seconds) + int(micros) / 1e6
        skew_s = theirs - min(max(theirs, before), time.time())
        found = f"{abs(skew_s):.2f} s {'ahead of' if skew_s > 0 else 'behind'} this machine"
        if abs(skew_s) > SKEW_S:
            advice = "run NTP on both: deadlines go by the server's clock, traces by this one"
            return [Finding("clock", WARN, found, advice)]
        return [Finding("clock", GOOD, found)]

    @property
    def _far(self) -> bool:
        address = self._connection.address
        if address is None or address.kind == UNIX:
            return False
        return any(host not in LOOPBACK for host, _ in address.hosts)

    @property
    def _has_password(self) -> bool:
        address = self._connection.address
        return address is None or "password" in address.options

    async def _config(self, name: str) -> str | None:
        """A server setting; None where this user may not ask."""
        try:
            reply = await self._connection.ask_server("CONFIG GET", name)
        except _REFUSED:
            return None
        return texts_of(reply).get(name, "")

    async def _info(self, section: str) -> dict[str, Any]:
        try:
            found = await self._connection.ask_server("INFO", section)
        except _REFUSED:
            return {}
        return {text_of(name): value for name, value in found.items()}

    async def _text(self, *command: str) -> str | None:
        try:
            return text_of(await self._connection.ask_server(*command))
        except _REFUSED:
            return None
