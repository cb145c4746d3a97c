"""A worker's side of the queue: one method per script, and the order in which classes are served.

The job's hash is the authority: every script checks state and attempt there first. The lease clock
is the idle time of the job's entry in the consumer group: a claim sets it for free, renewing costs
one XCLAIM, and no further key has to be kept in step. How long the lease is stands in the hash, so
that workers with different leases reclaim each other's jobs at the right time.

Invariant: nothing here changes a job whose attempt is not the one it was claimed with.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenfleet.producer.connection import Broker, Connection
from tokenfleet.producer.keys import PRIORITIES, check_name, partition_of
from tokenfleet.producer.protocol import Event, EventError, JobResult, State
from tokenfleet.producer.scripts import Script, load
from tokenfleet.worker.claims import (
    BEHIND,
    FENCED,
    ClaimedJob,
    Emission,
    EmitOutcome,
    LogBehind,
    by_partition,
    flat,
    last_reason,
    outcome_of,
    split_final,
    text,
)
from tokenfleet.worker.groups import Groups
from tokenfleet.worker.priorities import ClassOrder
from tokenfleet.worker.taker import Taker

__all__ = ["ClaimedJob", "Emission", "EmitOutcome", "JobQueue", "LogBehind"]

EMIT, RENEW, FINISH, RELEASE, FAIL, RECLAIM, PHANTOMS, REPAIR, ADOPT = (
    load("tokenfleet.worker.lua", name)
    for name in (
        *("emit", "renew", "finish", "release"),
        *("fail", "reclaim", "phantoms", "repair", "adopt"),
    )
)

PATIENCE_S = 0.5
"""How long a call that may be repeated is repeated over a lost connection."""

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0


class JobQueue:
    """The queues of one model, for one worker.

    Calls raise BrokerUnavailable when Redis does not answer; all but `claim` may be repeated then.
    """

    def __init__(
        self,
        broker: Broker | Connection,
        *,
        namespace: str,
        model_name: str,
        worker_id: str,
        lease_s: float = 30.0,
        max_failures: int = 3,
        log_ttl_s: float = 600.0,
        result_ttl_s: float = 3600.0,
        partitions: int | None = None,
        order: ClassOrder | None = None,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._owns = not isinstance(broker, Connection)
        self._connection = (
            broker
            if isinstance(broker, Connection)
            else Connection(broker, namespace=namespace, partitions=partitions)
        )
        self.worker_id = check_name("worker_id", worker_id)
        self.model_name = model_name
        self._lease_ms = int(lease_s * 1000)
        self._max_failures = max_failures
        self._ttls = [int(result_ttl_s * 1000), int(log_ttl_s * 1000)]
        self._uniform = uniform
        self._groups = Groups(self._connection)
        self._first_partition = 0
        self._rank: Counter[int] = Counter()
        self._taker = Taker(
            self._connection,
            worker_id=worker_id,
            model_name=model_name,
            lease_ms=self._lease_ms,
            ttls=self._ttls,
            order=order or ClassOrder(),
            bury=self._bury,
            regrouped=self._restart_repair,
        )

    @property
    def connection(self) -> Connection:
        """For the control channel and other business of the same worker."""
        return self._connection

    async def ensure(self) -> list[str]:
        """Redis is usable and the groups exist. Returns warnings about how it is set up."""
        await self._connection.ready()
        await self._groups.ensure(self._all_streams())
        return await self._groups.policy_warnings()

    async def claim(self, count: int) -> list[ClaimedJob]:
        """Take up to `count` waiting jobs. Never repeated; a lost reply leaves phantoms.

        Raises BrokerUnavailable only when nothing was claimed: what came before the connection
        broke is returned.
        """
        jobs = await self._taker.claim(count, self._partitions())
        self._first_partition = (self._first_partition + 1) % self._connection.partitions
        return jobs

    async def swap(self, victims: Sequence[ClaimedJob]) -> tuple[list[ClaimedJob], frozenset[str]]:
        """Take jobs of more urgent classes, each in the place of one of `victims`.

        The victims, first ones first, go back to the front of their class; what they have made must
        have been logged. Returns the jobs taken and the ids put back. Never repeated, as claim.
        """
        return await self._taker.swap(victims, self._partitions())

    async def wait(self, timeout_s: float) -> bool:
        """Return when a job may be there, or the time is over. Claims nothing."""
        return await self._taker.wait(timeout_s)

    async def wait_urgent(self, timeout_s: float) -> bool:
        """Return when there may be something to swap for, or the time is over."""
        return await self._taker.wait_urgent(timeout_s)

    async def renew(self, jobs: Iterable[ClaimedJob]) -> frozenset[str]:
        """Extend the leases. Returns the ids that are not this worker's any more."""
        lost: set[str] = set()
        for partition, group in by_partition(list(jobs), lambda job: job.id).items():
            keys = [self._connection.keys(partition).job(job.id) for job in group]
            args = [self.worker_id, *(part for job in group for part in (job.id, job.attempt))]
            codes = await self._run(RENEW, partition, keys, args)
            lost.update(job.id for job, code in zip(group, codes) if code & FENCED)
        return frozenset(lost)

    async def emit(self, emissions: Sequence[Emission]) -> EmitOutcome:
        """Log and announce; one call per partition. Repeating it does no harm."""
        codes: dict[str, int] = {}
        logged: dict[str, int] = {}
        for partition, group in self._by_partition(emissions).items():
            keys = [self._connection.keys(partition).job(group[0].job_id)]
            args: list[Any] = []
            for one in group:  # 256 jobs, 40 times a second: one pass, few objects
                start = f"{one.job_id} {one.attempt} {one.start_offset} "
                events = one.events
                if len(events) == 1:
                    args += (f"{start}{events[0].end}", events[0].pack())
                else:
                    args.append(start + " ".join([str(event.end) for event in events]))
                    args += [event.pack() for event in events]
            reply = await self._run(EMIT, partition, keys, args)
            for position, code, offset in zip(*[iter(reply)] * 3):
                job_id = group[position - 1].job_id
                codes[job_id] = code
                if code & BEHIND:
                    logged[job_id] = offset
        return outcome_of(codes, logged)

    async def finish(
        self,
        job: ClaimedJob,
        events: Sequence[Event],
        result: JobResult | None,
        *,
        state: str = "finished",
        error: EventError | None = None,
    ) -> bool:
        """The job's end, with its last events. True: it is in Redis; False: fenced.

        The terminal event is the last of `events` when that is final, and made here otherwise.
        `cancelled` becomes `expired` where nobody asked to cancel and the deadline has passed.
        Raises LogBehind when the log does not reach the first event.
        """
        before, final = split_final(events)
        names = self._connection.keys(partition_of(job.id))
        args: list[Any] = [job.id, job.attempt, State(state).value]
        args += [b"" if result is None else replace(result, worker=self.worker_id).pack()]
        args += ["", ""] if error is None else [error.code, error.message]
        args += [*self._ttls, final, last_reason(State(state), result)]
        args += [events[0].offset if events else "", *flat(before)]
        keys = [names.job(job.id), names.events(job.id)]
        code, detail = await self._run(FINISH, names.partition, keys, args)
        if code == BEHIND:
            raise LogBehind(job.id, int(detail))
        return bool(code)

    async def release(
        self, jobs: Iterable[ClaimedJob], reason: str, *, preempted: bool = False
    ) -> frozenset[str]:
        """Hand jobs back unharmed, to the front of their class. Returns the ids handed back.

        `reason` is for the caller's log; the job does not keep it. `preempted`: they make way for
        more urgent ones, which the job counts.
        """
        released: set[str] = set()
        for partition, group in by_partition(list(jobs), lambda job: job.id).items():
            keys = [self._connection.keys(partition).job(job.id) for job in group]
            args: list[Any] = [*self._ttls, int(preempted)]
            args += [part for job in group for part in (job.id, job.attempt)]
            done = await self._run(RELEASE, partition, keys, args)
            released.update(job.id for job, mine in zip(group, done) if mine)
        return frozenset(released)

    async def fail(
        self, job: ClaimedJob, code: str, message: str, *, retryable: bool
    ) -> State | None:
        """An attempt went wrong. Returns the job's state now; None: it is another attempt's.

        Retryable: the job waits out its back-off, or is dead-lettered when its failures are used
        up. Not retryable: it has failed.
        """
        return await self._fail(job.id, job.attempt, code, message, retryable=retryable)

    async def adopt(self, job: ClaimedJob, events: Sequence[Event]) -> ClaimedJob | None:
        """Give Redis back a job that it has forgotten while it ran here (FLUSHALL).

        `events`: all that had been logged, as they were logged. Returns the job under its new
        attempt, to go on with; None when Redis knows the job: it is another's then.
        """
        names = self._connection.keys(partition_of(job.id))
        request, stream = job.request, names.queue(self.model_name, job.priority)
        keys = [names.job(job.id), names.events(job.id), stream]
        keys += [names.live(self.model_name), names.deadline]
        args: list[Any] = [job.id, self.worker_id, self._lease_ms, job.attempt]
        args += [request.pack(1 << 62), request.model, job.priority, request.tenant]
        args += [job.deadline_ms or 0, job.submitted_ms]
        args += ["" if request.max_failures is None else request.max_failures]
        args += [request.on_disconnect, *flat(events)]
        attempt = await self._run(ADOPT, names.partition, keys, args)
        if not attempt:
            return None
        offset = events[-1].end if events else 0
        return replace(
            job, attempt=attempt, offset=offset, logged=tuple(events), failures=0, stream=stream
        )

    async def reclaim(self, limit: int = 100) -> int:
        """Move on jobs whose lease or deadline is over, in all classes. Returns how many."""
        moved = 0
        for partition in self._partitions():
            args = [self._lease_ms, limit, self._max_failures, *self._ttls]
            moved += await self._run(RECLAIM, partition, self._streams(partition), args)
            await self.repair(partition, limit)
        return moved

    async def repair(self, partition: int = 0, count: int = 100) -> int:
        """Look at the next `count` live jobs; those that lost their queue entry get a new one."""
        keys = [self._connection.keys(partition).live(self.model_name)]
        args = [self._rank[partition], count]
        self._rank[partition], put_back = await self._run(REPAIR, partition, keys, args)
        return int(put_back)

    async def release_phantoms(self, known_ids: Collection[str]) -> frozenset[str]:
        """Release what this worker holds and does not know. No claim may be in flight."""
        released: set[str] = set()
        for partition in self._partitions():
            args = [self.worker_id, *self._ttls, *known_ids]
            ids = await self._run(PHANTOMS, partition, self._streams(partition), args)
            released.update(job_id.decode() for job_id in ids)
        return frozenset(released)

    async def backlog(self) -> dict[str, int]:
        """Jobs waiting to be claimed, per class, `:front` included; running ones not counted."""
        counts = dict.fromkeys(PRIORITIES, 0)
        for partition in self._partitions():
            for priority in PRIORITIES:
                counts[priority] += await self._groups.waiting(self._pair(partition, priority))
                counts[priority] += await self._held_back(partition, priority)
        return counts

    async def _held_back(self, partition: int, priority: str) -> int:
        """Jobs in the backlogs of tenants with limits."""
        names, total = self._connection.keys(partition), 0
        backlogs = names.backlogs(self.model_name, priority)
        for tenant in await self._connection.execute("SMEMBERS", backlogs):
            backlog = names.tenant_backlog(text(tenant), self.model_name, priority)
            total += int(await self._connection.execute("ZCARD", backlog))
        return total

    async def heartbeat(self, info: Mapping[str, str | int | float], *, ttl_s: float = 15.0) -> int:
        """Show this worker in the worker table for `ttl_s`. Returns the server's time in ms."""
        line = {"model": self.model_name, **info}
        return await self._groups.heartbeat(self.worker_id, line, ttl_ms=int(ttl_s * 1000))

    async def leave(self) -> None:
        """Leave the worker table, and the groups in which no job is held."""
        await self._groups.heartbeat(self.worker_id, {}, ttl_ms=0)
        await self._groups.leave(self._all_streams(), self.worker_id)

    async def aclose(self) -> None:
        """Stop waiting; close the connection unless it was handed in."""
        await self._taker.aclose()
        if self._owns:
            await self._connection.aclose()

    async def _bury(self, job_id: str, attempt: int, reason: str) -> None:
        await self._fail(job_id, attempt, "undecodable", reason, retryable=False, bury=True)

    def _restart_repair(self, partition: int) -> None:
        """Groups were gone there: look at all live jobs again, from the first."""
        self._rank[partition] = 0

    async def _fail(
        self,
        job_id: str,
        attempt: int,
        code: str,
        message: str,
        *,
        retryable: bool,
        bury: bool = False,
    ) -> State | None:
        names = self._connection.keys(partition_of(job_id))
        args: list[Any] = [job_id, attempt, code, message, int(retryable), self._max_failures]
        args += [*self._ttls, int(FIRST_BACKOFF_S * 1000), int(LONGEST_BACKOFF_S * 1000)]
        args += [self._uniform(), int(bury)]
        keys = [names.job(job_id), names.events(job_id)]
        state = text(await self._run(FAIL, names.partition, keys, args))
        return State(state) if state else None

    async def _run(
        self,
        script: Script,
        partition: int,
        keys: list[str],
        args: list[Any],
        *,
        patience_s: float = PATIENCE_S,
    ) -> Any:
        return await self._connection.run(script, partition, keys, args, patience_s=patience_s)

    def _by_partition(self, emissions: Sequence[Emission]) -> dict[int, Sequence[Emission]]:
        if self._connection.partitions == 1:
            return {0: emissions}
        return dict(by_partition(emissions, lambda one: one.job_id))

    def _partitions(self) -> list[int]:
        """All partitions, beginning with another one after each claim."""
        first, total = self._first_partition, self._connection.partitions
        return [(first + step) % total for step in range(total)]

    def _pair(self, partition: int, priority: str) -> tuple[str, str]:
        names = self._connection.keys(partition)
        return names.front(self.model_name, priority), names.queue(self.model_name, priority)

    def _streams(self, partition: int) -> list[str]:
        return [key for priority in PRIORITIES for key in self._pair(partition, priority)]

    def _all_streams(self) -> list[str]:
        return [key for partition in self._partitions() for key in self._streams(partition)]
