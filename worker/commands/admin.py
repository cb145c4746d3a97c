"""Looking at a fleet from outside: queues, live workers, dead letters.

Everything here reads, but `replay`; and a replay is a new job: a job that has ended stays as it
ended. Counts are taken from lengths and pending entries, never from a group's lag, which deletes
falsify.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import InvalidJob, JobExpired
from tokenfleet.producer.keys import GROUP, PRIORITIES, Keys, partition_of
from tokenfleet.producer.protocol import JobRequest

DEAD_FIELDS = ("model", "priority", "attempt", "failures", "offset", "error_code", "error_message")


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """One class of one model, over all partitions."""

    model: str
    priority: str
    waiting: int = 0
    """Not claimed yet, those handed back included."""
    running: int = 0
    """Under a worker's lease."""
    oldest_s: float | None = None
    """How long the next job has waited; None when none waits."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job whose failures are used up, or that nobody could read."""

    job_id: str
    died_ms: int
    model: str
    priority: str
    attempt: int
    failures: int
    offset: int
    error_code: str
    error_message: str


class Admin:
    """One fleet's namespace. Raises what the client raises when Redis is away."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def partitions(self) -> list[int]:
        """Those that hold a job, found by their keys, and partition 0."""
        found = {0, *range(self._connection.partitions)}
        async for key in self._scan("live", "zset"):
            found.add(_partition_in(key))
        return sorted(found)

    async def queues(self) -> list[QueueDepth]:
        """Every queue that has jobs or a consumer group, by model and priority."""
        depths: dict[tuple[str, str], QueueDepth] = {}
        now_ms = await self.now_ms()
        for key in await self.streams():
            model, priority = _class_in(key)
            one = await self._depth(key, model, priority, now_ms)
            known = depths.get((model, priority), QueueDepth(model, priority))
            depths[model, priority] = _sum(known, one)
        order = {priority: rank for rank, priority in enumerate(PRIORITIES)}
        return sorted(depths.values(), key=lambda d: (d.model, order.get(d.priority, 9)))

    async def streams(self) -> list[str]:
        """The keys of all queue streams, the `:front` ones included."""
        return [key async for key in self._scan("q:*", "stream")]

    async def delayed(self) -> int:
        """Jobs that may not be claimed yet: a delay, or the pause before their next try."""
        return sum([await self._zcard(self._keys(p).delay) for p in await self.partitions()])

    async def workers(self) -> list[dict[str, str]]:
        """What each live worker says of itself, with its id."""
        table: dict[str, dict[str, str]] = {}
        for partition in await self.partitions():
            keys = self._keys(partition)
            for name in await self._execute("ZRANGE", keys.workers, 0, -1):
                said = texts_of(await self._execute("HGETALL", keys.worker(name.decode())))
                if said:
                    table[name.decode()] = {"worker": name.decode(), **said}
        return [table[name] for name in sorted(table)]

    async def dead(self, limit: int = 100) -> list[DeadLetter]:
        """The newest dead letters, newest first."""
        found: list[DeadLetter] = []
        for partition in await self.partitions():
            keys = self._keys(partition)
            rows = await self._execute("ZREVRANGE", keys.dead, 0, limit - 1, "WITHSCORES")
            found += [
                await self._letter(keys, job_id.decode(), int(float(score)))
                for job_id, score in _scored(rows)
            ]
        return sorted(found, key=lambda letter: -letter.died_ms)[:limit]

    async def dead_one(self, job_id: str) -> tuple[DeadLetter, JobRequest | None]:
        """One dead letter and what it asked for; None where nobody can read that.

        Raises:
            JobExpired: no dead letter has this id.
        """
        keys = self._keys(partition_of(job_id))
        score = await self._execute("ZSCORE", keys.dead, job_id)
        if score is None:
            raise JobExpired(job_id, "a dead letter")
        packed = await self._execute("HGET", keys.job(job_id), "request")
        try:
            request = JobRequest.unpack(packed) if packed else None
        except InvalidJob:
            request = None
        return await self._letter(keys, job_id, int(float(score))), request

    async def replay(self, job_id: str) -> str:
        """Submit what a dead letter asked for as a new job, whose id is returned.

        Repeating it gives the same new job: its idempotency key names the old one.

        Raises:
            JobExpired: no dead letter has this id.
            InvalidJob: its payload cannot be read.
        """
        _, request = await self.dead_one(job_id)
        if request is None:
            raise InvalidJob("job", job_id, "holds a payload that cannot be read; submit it anew")
        asked = {field.name: getattr(request, field.name) for field in fields(request)}
        for carried in ("traceparent", "tracestate", "tenant"):
            del asked[carried]
        asked["idempotency_key"] = f"replay:{job_id}"
        async with AsyncClient(
            self._connection.client,
            namespace=self._connection.namespace,
            tenant=request.tenant,
        ) as client:
            job = await client.submit(**asked)
        await self._execute("ZREM", self._keys(partition_of(job_id)).dead, job_id)
        return job.id

    async def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self._execute("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def _depth(self, key: str, model: str, priority: str, now_ms: int) -> QueueDepth:
        length = int(await self._execute("XLEN", key))
        groups = {
            group["name"]: group
            for group in map(texts_of, await self._execute("XINFO", "GROUPS", key))
        }
        group = groups.get(GROUP, {"pending": "0", "last-delivered-id": "0-0"})
        pending = int(group["pending"])
        after = f"({group['last-delivered-id']}"
        waiting = await self._execute("XRANGE", key, after, "+", "COUNT", 1)
        oldest = None if not waiting else (now_ms - int(waiting[0][0].split(b"-")[0])) / 1000
        return QueueDepth(model, priority, max(0, length - pending), pending, oldest)

    async def _letter(self, keys: Keys, job_id: str, died_ms: int) -> DeadLetter:
        values = await self._execute("HMGET", keys.job(job_id), *DEAD_FIELDS)
        known = {name: (value or b"").decode() for name, value in zip(DEAD_FIELDS, values)}
        return DeadLetter(
            job_id,
            died_ms,
            model=known["model"],
            priority=known["priority"],
            attempt=int(known["attempt"] or 0),
            failures=int(known["failures"] or 0),
            offset=int(known["offset"] or 0),
            error_code=known["error_code"],
            error_message=known["error_message"],
        )

    async def _zcard(self, key: str) -> int:
        return int(await self._execute("ZCARD", key))

    async def _scan(self, rest: str, kind: str) -> AsyncIterator[str]:
        pattern = f"{{{self._connection.namespace}:*}}:{rest}"
        async for key in self._connection.client.scan_iter(match=pattern, count=500, _type=kind):
            yield key.decode()

    def _keys(self, partition: int) -> Keys:
        return self._connection.keys(partition)

    async def _execute(self, *command: Any) -> Any:
        return await self._connection.execute(*command)


def _partition_in(key: str) -> int:
    return int(key[key.index(":") + 1 : key.index("}")])


def _class_in(key: str) -> tuple[str, str]:
    """Model and priority in `{namespace:p}:q:<model>:<priority>[:front]`;

    a model may hold colons.
    """
    model, _, priority = key.split("}:q:", 1)[1].removesuffix(":front").rpartition(":")
    return model, priority


def _sum(one: QueueDepth, other: QueueDepth) -> QueueDepth:
    ages = [age for age in (one.oldest_s, other.oldest_s) if age is not None]
    return QueueDepth(
        one.model,
        one.priority,
        one.waiting + other.waiting,
        one.running + other.running,
        max(ages, default=None),
    )


def _scored(rows: Any) -> list[tuple[bytes, Any]]:
    """WITHSCORES replies are flat in RESP2 and pairs in RESP3."""
    if rows and isinstance(rows[0], list | tuple):
        return [(name, score) for name, score in rows]
    return list(zip(rows[::2], rows[1::2], strict=True))


def texts_of(reply: Any) -> dict[str, str]:
    """A map reply, flat or not, as text."""
    if not isinstance(reply, Mapping):
        reply = dict(zip(reply[::2], reply[1::2], strict=True))
    return {text_of(name): text_of(value) for name, value in reply.items()}


def text_of(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
