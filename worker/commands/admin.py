"""Looking at a fleet from outside: what `FleetReader` reads, and dead letters.

Everything here reads, but `replay` and `drop`; a replay is a new job: a job that has ended stays
as it ended.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.errors import InvalidJob, JobExpired
from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.fleet_view import QueueDepth, texts_of
from tokenfleet.producer.keys import Keys, partition_of
from tokenfleet.producer.protocol import JobRequest

__all__ = ["Admin", "DeadLetter", "QueueDepth", "texts_of"]

DEAD_FIELDS = ("model", "priority", "attempt", "failures", "offset", "error_code", "error_message")


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


class Admin(FleetReader):
    """One fleet's namespace. Raises what the client raises when Redis is away."""

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
            raise JobExpired(job_id, "dead letter")
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
            partitions=self._connection.partitions,
        ) as client:
            job = await client.submit(**asked)
        await self._execute("ZREM", self._keys(partition_of(job_id)).dead, job_id)
        return job.id

    async def drop(self, job_id: str) -> bool:
        """Forget a dead letter, with all that is kept of its job. False: there is none."""
        keys = self._keys(partition_of(job_id))
        if not await self._execute("ZREM", keys.dead, job_id):
            return False
        await self._execute("DEL", keys.job(job_id), keys.events(job_id))
        return True

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


def _scored(rows: Any) -> list[tuple[bytes, Any]]:
    """WITHSCORES replies are flat in RESP2 and pairs in RESP3."""
    if rows and isinstance(rows[0], list | tuple):
        return [(name, score) for name, score in rows]
    return list(zip(rows[::2], rows[1::2], strict=True))
