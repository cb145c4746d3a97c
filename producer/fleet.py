"""A fleet seen from outside, read from Redis: queues, live workers, running jobs.

What `tokenfleet queue`, `tokenfleet top`, the doctor and the gateway's status page show comes from
here, so that they cannot disagree. Counts are taken from lengths and pending entries, never from a
group's lag, which deletes falsify.

Invariant: everything here reads; nothing of the fleet is changed by being looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import RedisClusterException

from tokenfleet.producer.connection import Connection, RedisError, ResponseError
from tokenfleet.producer.errors import BrokerUnavailable, KeyOccupied
from tokenfleet.producer.fleet_view import (
    FleetStatus,
    QueueDepth,
    RunningJob,
    class_in,
    partition_in,
    sum_of,
    text_of,
    texts_of,
    worker_line,
)
from tokenfleet.producer.keys import GROUP, PRIORITIES, Keys
from tokenfleet.producer.kinds import occupied
from tokenfleet.producer.refusals import REFUSALS, refusal

AT_ONCE = 8
"""Connections that one look uses at most."""
SEARCH_S = 2.0
SEARCH_SHARE = 50
"""Queues are searched for among all keys at most every SEARCH_S seconds, and so that a search takes
no more than one part in SEARCH_SHARE of the time; what is known is looked at each time."""


class FleetReader:
    """Reads one fleet's namespace. Raises what the client raises when Redis is away.

    Args:
        clock: monotonic seconds, for how long a search stays good.
    """

    def __init__(
        self, connection: Connection, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._search_at = float("-inf")
        self._streams: set[str] = set()
        self._partitions: set[int] = set()

    async def status(self) -> FleetStatus:
        """Workers, queues and counts now."""
        await self._search()
        now_ms, lines, delayed, dead = await asyncio.gather(
            self.now_ms(),
            self._lines(self._partitions),
            self._count(self._partitions, "delay"),
            self._count(self._partitions, "dead"),
        )
        for said in lines.values():
            self._streams |= self._streams_of(said.get("model", ""))
        depths = await self._depths(self._streams)
        workers = (worker_line(name, said, now_ms) for name, said in sorted(lines.items()))
        return FleetStatus(now_ms, tuple(workers), tuple(depths), delayed, dead)

    async def running(self, limit: int = 50) -> list[RunningJob]:
        """Jobs under a lease, the longest running first; at most `limit`."""
        await self._search()
        now_ms = await self.now_ms()
        found = await asyncio.gather(
            *(self._running_in(key, limit, now_ms) for key in sorted(self._streams))
        )
        jobs = [job for jobs in found for job in jobs]
        return sorted(jobs, key=lambda job: (-job.age_s, job.job_id))[:limit]

    async def knows(self, model: str) -> bool:
        """Whether a live worker serves the model or a queue of it is there."""
        for partition in range(self._connection.partitions):
            keys = self._keys(partition)
            queues = [keys.queue(model, priority) for priority in PRIORITIES]
            backlogs = [keys.backlogs(model, priority) for priority in PRIORITIES]
            if await self._execute("EXISTS", *queues, *backlogs):
                return True
        return model in await self.served()

    async def served(self) -> set[str]:
        """The models that live workers serve; asks for no key that it does not know."""
        lines = await self._lines(range(self._connection.partitions))
        return {said.get("model", "") for said in lines.values()}

    async def models(self) -> dict[str, int]:
        """Every model that a worker serves or a queue is there for, and its live workers."""
        await self._search()
        lines = await self._lines(self._partitions)
        models = {class_in(key)[0]: 0 for key in self._streams}
        for said in lines.values():
            models[said.get("model", "")] = models.get(said.get("model", ""), 0) + 1
        return models

    async def partitions(self) -> list[int]:
        """Those that hold a job, found by their keys, and those that the connection knows."""
        found = {0, *range(self._connection.partitions)}
        async for key in self._scan("live:*", "zset"):
            found.add(partition_in(key))
        return sorted(found)

    async def streams(self) -> list[str]:
        """The keys of all queue streams, the `:front` ones included."""
        return [key async for key in self._scan("q:*", "stream")]

    async def _queues(self) -> set[str]:
        """The same, and queues without a stream yet: tenants' backlogs hold all of their jobs."""
        found = set(await self.streams())
        async for key in self._scan("backlogs:*", "set"):
            found.add(key.replace("}:backlogs:", "}:q:", 1))
        return found

    async def queues(self) -> list[QueueDepth]:
        """Every queue that has jobs or a consumer group, by model and priority."""
        return await self._depths(await self._queues())

    async def occupied(self) -> list[KeyOccupied]:
        """Keys shared by jobs at which somebody else's value lies: those of single jobs, whose
        names nobody meets by chance, are not looked at."""
        found = [key async for key in self._scan("[^jei]*", None)]
        looks = (occupied([key], self._type_of) for key in found)
        return [one for one in await asyncio.gather(*looks) if one is not None]

    async def _type_of(self, key: str) -> bytes:
        async with self._gate:
            kind: bytes = await self._execute("TYPE", key)
        return kind

    async def delayed(self) -> int:
        """Jobs that may not be claimed yet: a delay, or the pause before their next try."""
        return await self._count(await self.partitions(), "delay")

    async def workers(self) -> list[dict[str, str]]:
        """What each live worker says of itself, with its id."""
        lines = await self._lines(await self.partitions())
        return [{"worker": name, **lines[name]} for name in sorted(lines)]

    async def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self._execute("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def _search(self) -> None:
        """Look for queues that are not known yet, now and then: it walks over all keys."""
        began = self._clock()
        if began < self._search_at:
            return
        self._partitions = set(await self.partitions())
        self._streams = await self._queues()
        ended = self._clock()
        self._search_at = ended + max(SEARCH_S, SEARCH_SHARE * (ended - began))

    def _streams_of(self, model: str) -> set[str]:
        """The queues that a worker of this model makes."""
        if not model:
            return set()
        keys = [self._keys(partition) for partition in range(self._connection.partitions)]
        return {key.queue(model, priority) for key in keys for priority in PRIORITIES} | {
            key.front(model, priority) for key in keys for priority in PRIORITIES
        }

    async def _depths(self, streams: set[str] | list[str]) -> list[QueueDepth]:
        now_ms = await self.now_ms()
        found = await asyncio.gather(*(self._depth(key, now_ms) for key in streams))
        depths: dict[tuple[str, str], QueueDepth] = {}
        for one in found:
            known = depths.get((one.model, one.priority), QueueDepth(one.model, one.priority))
            depths[one.model, one.priority] = sum_of(known, one)
        order = {priority: rank for rank, priority in enumerate(PRIORITIES)}
        return sorted(depths.values(), key=lambda d: (d.model, order.get(d.priority, 9)))

    async def _depth(self, key: str, now_ms: int) -> QueueDepth:
        try:
            return await self._depth_of(key, now_ms)
        except KeyOccupied:  # the doctor says so; here it must not hide the other queues
            return QueueDepth(*class_in(key))

    async def _depth_of(self, key: str, now_ms: int) -> QueueDepth:
        model, priority = class_in(key)
        async with self._gate:
            length = int(await self._execute("XLEN", key))
            group = await self._group(key)
            pending = int(group["pending"])
            after = f"({group['last-delivered-id']}"
            first = await self._execute("XRANGE", key, after, "+", "COUNT", 1)
            keys = self._keys(partition_in(key))
            paused = await self._execute("SISMEMBER", keys.paused, f"{model}:{priority}")
            waiting = max(0, length - pending)
            since = [int(first[0][0].split(b"-")[0])] if first else []
            front = waiting if key.endswith(":front") else 0
            if not key.endswith(":front"):
                for count, oldest_ms in await self._backlogs(keys, model, priority):
                    waiting += count
                    since.append(oldest_ms)
        oldest = (now_ms - min(since)) / 1000 if since else None
        return QueueDepth(model, priority, waiting, pending, oldest, front, bool(paused))

    async def _backlogs(self, keys: Keys, model: str, priority: str) -> list[tuple[int, int]]:
        """Of each tenant with limits: jobs that wait for their turn, and since when the first."""
        found = []
        for tenant in await self._execute("SMEMBERS", keys.backlogs(model, priority)):
            backlog = keys.tenant_backlog(text_of(tenant), model, priority)
            first = await self._execute("ZRANGE", backlog, 0, 0, "WITHSCORES")
            if first:
                score = first[0][1] if isinstance(first[0], list | tuple) else first[1]
                found.append((int(await self._execute("ZCARD", backlog)), int(float(score))))
        return found

    async def _group(self, key: str) -> dict[str, str]:
        try:
            groups = map(texts_of, await self._execute("XINFO", "GROUPS", key))
        except ResponseError:  # no such key any more
            groups = map(texts_of, ())
        named = {group["name"]: group for group in groups}
        return named.get(GROUP, {"pending": "0", "last-delivered-id": "0-0"})

    async def _running_in(self, key: str, limit: int, now_ms: int) -> list[RunningJob]:
        model, priority = class_in(key)
        async with self._gate:
            jobs = []
            for held in await self._held(key, limit):
                entry = held["message_id"]
                found = await self._execute("XRANGE", key, entry, entry)
                if found:
                    job_id = texts_of(found[0][1])["j"]
                    figures = await self._running_job(key, job_id, now_ms)
                    worker = text_of(held["consumer"])
                    jobs.append(RunningJob(job_id, model, priority, worker, *figures))
        return jobs

    async def _held(self, key: str, limit: int) -> list[dict[str, Any]]:
        """Entries of a queue that workers hold, oldest first."""
        with reaching(self._connection):
            try:
                held: list[dict[str, Any]] = await self._connection.client.xpending_range(
                    key, GROUP, "-", "+", limit
                )
            except ResponseError:  # no such key or group
                return []
        return held

    async def _running_job(self, key: str, job_id: str, now_ms: int) -> tuple[int, int, float]:
        name = self._keys(partition_in(key)).job(job_id)
        values = await self._execute("HMGET", name, "attempt", "offset", "submitted")
        attempt, offset, submitted = (int(value or 0) for value in values)
        return attempt, offset, max(0, now_ms - submitted) / 1000 if submitted else 0.0

    async def _lines(self, partitions: Any) -> dict[str, dict[str, str]]:
        table: dict[str, dict[str, str]] = {}
        for partition in sorted(partitions):
            keys = self._keys(partition)
            for name in await self._execute("ZRANGE", keys.workers, 0, -1):
                said = texts_of(await self._execute("HGETALL", keys.worker(name.decode())))
                if said:
                    table[name.decode()] = said
        return table

    async def _count(self, partitions: Any, kind: str) -> int:
        counts = [
            int(await self._execute("ZCARD", getattr(self._keys(partition), kind)))
            for partition in sorted(partitions)
        ]
        return sum(counts)

    async def _scan(self, rest: str, kind: str | None) -> AsyncIterator[str]:
        pattern = f"{{{self._connection.namespace}:*}}:{rest}"
        with reaching(self._connection):
            async for key in self._connection.client.scan_iter(
                match=pattern, count=500, _type=kind
            ):
                yield text_of(key)

    def _keys(self, partition: int) -> Keys:
        return self._connection.keys(partition)

    async def _execute(self, *command: Any) -> Any:
        return await self._connection.execute(*command)


@contextmanager
def reaching(connection: Connection) -> Iterator[None]:
    """For commands that go past the connection's own repeating: its error all the same."""
    try:
        yield
    except REFUSALS as error:
        raise refusal(error) from error
    except ResponseError:
        raise
    except (RedisError, RedisClusterException, OSError) as error:
        raise BrokerUnavailable(f"{connection.describe()} was not reached ({error})") from error
