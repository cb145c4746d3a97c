"""What `tokenfleet doctor` looks at: is this Redis fit to hold jobs, and does anybody serve them?

Each check looks at one thing and says what to do where something is wrong. `bad` means that jobs
can be lost or are not served; `warn` that they might be.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.exceptions import ResponseError

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnsupported
from tokenfleet.producer.keys import GROUP
from tokenfleet.worker.commands.admin import Admin, texts_of

GOOD, WARN, BAD = "good", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome."""

    check: str
    level: str
    found: str
    advice: str = ""


class Doctor:
    """Examines one namespace on one server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._admin = Admin(connection)

    async def examine(self) -> list[Finding]:
        """All findings, in the order of the checks. Raises BrokerUnavailable when Redis is away."""
        checks: tuple[Callable[[], Awaitable[list[Finding]]], ...] = (
            self._version,
            self._latency,
            self._scripts,
            self._memory,
            self._persistence,
            self._groups,
            self._workers,
            self._dead,
        )
        findings: list[Finding] = []
        for check in checks:
            findings += await check()
        return findings

    async def _version(self) -> list[Finding]:
        hello = texts_of(await self._connection.execute("HELLO"))
        found = f"{hello['server']} {hello['version']}, {hello.get('mode', 'standalone')}"
        try:
            await self._connection.ready()
        except BrokerUnsupported as error:
            return [Finding("version", BAD, found, str(error))]
        return [Finding("version", GOOD, found)]

    async def _latency(self) -> list[Finding]:
        await self._connection.execute("PING")
        started = time.perf_counter()
        for _ in range(20):
            await self._connection.execute("PING")
        each_ms = (time.perf_counter() - started) / 20 * 1000
        found = f"{each_ms:.2f} ms a round trip"
        if each_ms > 20:
            return [Finding("latency", WARN, found, "move workers nearer: flushes wait for it")]
        return [Finding("latency", GOOD, found)]

    async def _scripts(self) -> list[Finding]:
        keys = self._connection.keys(0)
        try:
            await self._connection.execute(
                "EVAL", "return redis.call('EXISTS', KEYS[1])", 1, keys.workers
            )
        except ResponseError as error:
            advice = "allow EVAL, EVALSHA and the fleet's keys to this user (ACL SETUSER)"
            return [Finding("scripts", BAD, str(error), advice)]
        return [Finding("scripts", GOOD, "Lua runs")]

    async def _memory(self) -> list[Finding]:
        policy, limit = await self._config("maxmemory-policy"), await self._config("maxmemory")
        if policy is None:
            return [Finding("memory", WARN, "not allowed to ask", "make sure it is noeviction")]
        found = f"maxmemory-policy {policy}, maxmemory {limit or 0}"
        if policy != "noeviction":
            advice = "CONFIG SET maxmemory-policy noeviction: this one may drop jobs"
            return [Finding("memory", BAD if limit not in (None, "0") else WARN, found, advice)]
        return [Finding("memory", GOOD, found)]

    async def _persistence(self) -> list[Finding]:
        aof = await self._config("appendonly")
        if aof is None:
            return [Finding("persistence", WARN, "not allowed to ask", "make sure AOF is on")]
        if aof != "yes":
            advice = "CONFIG SET appendonly yes: without it a restart forgets every job"
            return [Finding("persistence", WARN, "append-only file off", advice)]
        sync = await self._config("appendfsync")
        return [Finding("persistence", GOOD, f"append-only file on, fsync {sync}")]

    async def _groups(self) -> list[Finding]:
        queues = await self._admin.streams()
        missing = [key for key in queues if not await self._has_group(key)]
        if missing:
            advice = "start a worker of that model: it makes its groups, and loses nothing"
            found = f"no group '{GROUP}' on {', '.join(sorted(missing))}"
            return [Finding("groups", WARN, found, advice)]
        return [Finding("groups", GOOD, f"{len(queues)} queue streams, each with its group")]

    async def _has_group(self, key: str) -> bool:
        groups = await self._connection.execute("XINFO", "GROUPS", key)
        return any(texts_of(group)["name"] == GROUP for group in groups)

    async def _workers(self) -> list[Finding]:
        workers = await self._admin.workers()
        served = {worker.get("model", "") for worker in workers}
        waiting = {queue.model for queue in await self._admin.queues() if queue.waiting}
        findings = [
            Finding(
                "workers",
                BAD,
                f"jobs wait for {model}, and no live worker serves it",
                f"tokenfleet worker --model-name {model} --model PATH",
            )
            for model in sorted(waiting - served)
        ]
        if workers:
            found = f"{len(workers)} live, serving {', '.join(sorted(served))}"
            return [Finding("workers", GOOD, found), *findings]
        return findings or [Finding("workers", WARN, "none live", "start one: tokenfleet worker")]

    async def _dead(self) -> list[Finding]:
        letters = await self._admin.dead()
        if not letters:
            return [Finding("dead letters", GOOD, "none")]
        return [
            Finding(
                "dead letters",
                WARN,
                f"{len(letters)}, the newest: {letters[0].error_code}",
                "tokenfleet dead list; tokenfleet dead replay",
            )
        ]

    async def _config(self, name: str) -> str | None:
        """A server setting; None where this user may not ask."""
        try:
            reply = await self._connection.execute("CONFIG", "GET", name)
        except ResponseError:
            return None
        return texts_of(reply).get(name, "")
