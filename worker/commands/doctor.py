"""What `tokenfleet doctor` looks at: is this Redis fit to hold jobs, and does anybody serve them?

Each check looks at one thing and says what to do where something is wrong. `bad` means that jobs
can be lost or are not served; `warn` that they might be.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable

from redis.exceptions import ResponseError

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnsupported
from tokenfleet.producer.fleet import reaching
from tokenfleet.producer.fleet_view import texts_of
from tokenfleet.producer.keys import GROUP
from tokenfleet.worker.commands.admin import Admin
from tokenfleet.worker.commands.doctor_server import ServerChecks
from tokenfleet.worker.commands.findings import BAD, GOOD, WARN, Finding

__all__ = ["BAD", "GOOD", "WARN", "Doctor", "Finding"]

OVERDUE = 2
"""A running job whose lease was over this many leases ago should have been moved on."""
SHORTEST_LEASE_MS = 1000


class Doctor:
    """Examines one namespace on one server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._admin = Admin(connection)

    async def examine(self) -> list[Finding]:
        """All findings, in the order of the checks. Raises BrokerUnavailable when Redis is away."""
        server = ServerChecks(self._connection)
        checks: tuple[tuple[str, Callable[[], Awaitable[list[Finding]]]], ...] = (
            ("version", server.version),
            ("latency", server.latency),
            ("scripts", server.scripts),
            ("access", server.access),
            ("encryption", server.encryption),
            ("memory", server.memory),
            ("persistence", server.persistence),
            ("copies", server.copies),
            ("clock", server.clock),
            ("keys", self._keys),
            ("groups", self._groups),
            ("workers", self._workers),
            ("stuck jobs", self._stuck),
            ("dead letters", self._dead),
        )
        findings: list[Finding] = []
        for name, check in checks:
            try:
                findings += await check()
            except (BrokerUnsupported, ResponseError) as error:
                advice = "run as a user with the rights that `tokenfleet acl operator` prints"
                findings.append(Finding(name, WARN, f"could not look: {error}", advice))
        return findings

    async def _keys(self) -> list[Finding]:
        """Names of ours at which somebody else's value lies."""
        foreign = await self._admin.occupied()
        advice = "find out who wrote it; RENAME or DEL it, or use another namespace"
        findings = [
            Finding("keys", BAD, f"{one.key} holds a {one.found}, not our {one.wanted}", advice)
            for one in sorted(foreign, key=lambda one: one.key)
        ]
        return findings or [Finding("keys", GOOD, "all of the types that belong there")]

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
                f"tokenfleet worker --model-name {shlex.quote(model)} --model PATH",
            )
            for model in sorted(waiting - served)
        ]
        if workers:
            found = f"{len(workers)} live, serving {', '.join(sorted(served))}"
            return [Finding("workers", GOOD, found), *findings]
        return findings or [Finding("workers", WARN, "none live", "start one: tokenfleet worker")]

    async def _stuck(self) -> list[Finding]:
        """Running jobs whose lease is long over: no reaper looks at them."""
        stuck = [job for key in await self._admin.streams() for job in await self._overdue(key)]
        if not stuck:
            return [Finding("stuck jobs", GOOD, "none")]
        found = f"{len(stuck)} running jobs without a lease, first {stuck[0]}"
        advice = "start a worker of their model: the reaper in it moves them on"
        return [Finding("stuck jobs", BAD, found, advice)]

    async def _overdue(self, key: str) -> list[str]:
        names = self._connection.keys(int(key[key.index(":") + 1 : key.index("}")]))
        try:
            with reaching(self._connection):
                pending = await self._connection.client.xpending_range(
                    key, GROUP, "-", "+", 100, idle=SHORTEST_LEASE_MS
                )
        except ResponseError:
            return []  # no such group: `groups` says so
        found = []
        for held in pending:
            entries = await self._connection.execute(
                "XRANGE", key, held["message_id"], held["message_id"]
            )
            job_id = texts_of(entries[0][1])["j"] if entries else ""
            state, lease = await self._connection.execute(
                "HMGET", names.job(job_id), "state", "lease"
            )
            idle_ms = int(held["time_since_delivered"])
            if state == b"running" and idle_ms > OVERDUE * int(lease or 0):
                found.append(job_id)
        return found

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
