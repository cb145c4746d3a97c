"""Brings events into the jobs' logs: the first token at once and before those of other jobs, later
ones together, the end last.

Each partition has a lane of its own, with one flush on its way at a time: a server that says
nothing keeps the tokens of its own partitions, and nobody else's. What the engine makes meanwhile
waits as drafts inside the jobs and merges there, so a slow Redis costs delay and never memory
without bound. Events leave a job's hands only when Redis has said that it has them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol

from tokenfleet.worker.broker import BROKER_ERRORS, Broker, blames_request
from tokenfleet.worker.claims import together
from tokenfleet.worker.jobs import Job, Stage, arrived, take
from tokenfleet.worker.queue import EmitOutcome, JobQueue, LogBehind

_LOGGING = (Stage.RUNNING, Stage.LEAVING)
"""Stages in which a job's tokens go to its log."""


class Owner(Protocol):
    """Who acts on what a flush finds out."""

    def lost(self, job: Job, reason: str) -> None:
        """The lease is another's: stop, publish nothing more."""

    def fenced(self, job: Job) -> None:
        """Redis does not know the job as ours."""

    def out_of_step(self, job: Job) -> None:
        """The log does not end where this worker left it: hand the job back."""

    def cancel(self, job: Job) -> None:
        """A producer wants the job to end."""

    def expire(self, job: Job) -> None:
        """The job's deadline has passed."""

    def ended(self, job: Job) -> None:
        """The job's end is in Redis."""


class Publisher:
    """Flushes the dirty jobs.

    Args:
        flush_interval_s: how long later tokens may wait for company; 0 = every step.
        flushed: told how long each flush took, in seconds.
    """

    def __init__(
        self,
        queue: JobQueue,
        broker: Broker,
        owner: Owner,
        *,
        flush_interval_s: float,
        flushed: Callable[[float], None],
    ) -> None:
        self._new_lane = partial(_Lane, queue, broker, owner, flush_interval_s, flushed)
        self._lanes: dict[int, _Lane] = {}
        """By partition; made when a job of it has something to publish."""
        self._more = asyncio.Event()
        """Set when a lane was made."""

    def touch(self, job: Job, *, urgent: bool = False) -> None:
        """The job has something to publish; `urgent`: do not wait for the interval."""
        lane = self._lanes.get(job.partition) or self._lane(job.partition)
        lane.touch(job, urgent=urgent)

    @property
    def idle(self) -> bool:
        """Whether everything handed in has arrived."""
        return all(lane.idle for lane in self._lanes.values())

    async def run(self) -> None:
        """Flush until cancelled; an unreachable Redis is waited for."""
        running: dict[int, asyncio.Task[None]] = {}
        more = asyncio.ensure_future(self._more.wait())
        try:
            while True:
                self._more.clear()
                for partition in self._lanes.keys() - running.keys():
                    work = self._lanes[partition].run()
                    running[partition] = asyncio.create_task(work, name="publisher")
                if more.done():
                    more = asyncio.ensure_future(self._more.wait())
                await asyncio.wait((more, *running.values()), return_when=asyncio.FIRST_COMPLETED)
                for lane in running.values():
                    if lane.done():
                        lane.result()  # it ends by a fault of ours alone
        finally:
            await _end({more, *running.values()})

    async def flush(self) -> bool:
        """Publish what there is now. Returns False when Redis was not reached for all of it."""
        lanes = list(self._lanes.values())
        return all(await together([lane.flush() for lane in lanes]))

    def still(self, partition: int) -> AbstractAsyncContextManager[Callable[[], Awaitable[bool]]]:
        """Publish a partition's events once more, then none until the block is left, but for what
        the block asks for by calling what it is given: that flushes again, as `flush` does."""
        return self._lane(partition).still()

    async def settled(self, partition: int) -> None:
        """Return when the replies of what is on its way there now have come, or will not come."""
        await self._lane(partition).settled()

    def _lane(self, partition: int) -> _Lane:
        lane = self._lanes.get(partition)
        if lane is None:
            lane = self._lanes[partition] = self._new_lane()
            self._more.set()
        return lane


class _Lane:
    """The publisher of one partition; it has the contracts of the methods."""

    def __init__(
        self,
        queue: JobQueue,
        broker: Broker,
        owner: Owner,
        flush_interval_s: float,
        flushed: Callable[[float], None],
    ) -> None:
        self._queue = queue
        self._broker = broker
        self._owner = owner
        self._interval_s = flush_interval_s
        self._flushed = flushed
        self._hurried: dict[str, Job] = {}
        """Jobs with a first token: they go before the others, in a call of their own."""
        self._dirty: dict[str, Job] = {}
        """The others that have something to publish."""
        self._some = asyncio.Event()
        self._urgent = asyncio.Event()
        self._last_flush = 0.0
        self._flushing = asyncio.Lock()

    def touch(self, job: Job, *, urgent: bool = False) -> None:
        if urgent:
            self._hurried[job.engine_id] = job
        else:
            self._dirty[job.engine_id] = job
        if not self._some.is_set():
            self._some.set()
        if urgent or job.ending is not None:
            self._urgent.set()

    @property
    def idle(self) -> bool:
        return not self._dirty and not self._hurried

    async def run(self) -> None:
        while True:
            await self._some.wait()
            await self._until_due()
            self._some.clear()
            self._urgent.clear()
            if await self.flush():
                self._broker.reached()
            else:
                self._some.set()
                self._urgent.set()
                await self._broker.pause()

    async def flush(self) -> bool:
        async with self._flushing:
            return await self._flush()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
        async with self._flushing:
            await self._flush()
            yield self._flush

    async def settled(self) -> None:
        async with self._flushing:
            return

    async def _flush(self) -> bool:
        self._last_flush = time.monotonic()
        hurried, self._hurried = self._hurried.values(), {}
        if hurried and not await self._send(hurried):
            return False
        jobs, self._dirty = self._dirty.values(), {}
        return await self._send(jobs)

    async def _send(self, jobs: Iterable[Job]) -> bool:
        started = time.monotonic()
        ended, logging = _sorted(jobs)
        calls = [self._finish(job) for job in ended]
        if logging:
            calls.append(self._emit(logging))
        if not calls:
            return True
        done = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        self._flushed(time.monotonic() - started)
        return all(done)

    async def _until_due(self) -> None:
        """Until the interval is over or something urgent came."""
        left = self._last_flush + self._interval_s - time.monotonic()
        if left <= 0 or self._urgent.is_set():
            return
        try:
            async with asyncio.timeout(left):
                await self._urgent.wait()
        except TimeoutError:
            return

    async def _emit(self, jobs: list[Job]) -> bool:
        sent, emissions = take(jobs)
        if not sent:
            return True
        try:
            outcome = await self._queue.emit(emissions)
        except BROKER_ERRORS as error:
            if blames_request(error):
                return await self._emit_one_by_one(sent, error)
            self._broker.away("emit", error)
            for job in sent:
                self.touch(job)
            return False
        told = outcome.fenced | outcome.behind | outcome.cancelled
        if not told:
            arrived(sent)
            return True
        arrived(job for job in sent if job.id not in told)
        for job in sent:
            if job.id in told and job.stage is not Stage.GONE:
                self._settle(job, outcome)
        return True

    async def _emit_one_by_one(self, jobs: list[Job], error: Exception) -> bool:
        """One job's keys are broken: find it, and let the others go on."""
        if len(jobs) > 1:
            return all([await self._emit([job]) for job in jobs])
        self._owner.lost(jobs[0], f"Redis refuses its events: {error}")
        return True

    def _settle(self, job: Job, outcome: EmitOutcome) -> None:
        if job.id in outcome.fenced:
            self._owner.fenced(job)
        elif job.id in outcome.behind:
            self._owner.out_of_step(job)
        else:
            arrived([job])
            if job.id in outcome.expired:
                self._owner.expire(job)
            elif job.id in outcome.cancelled:
                self._owner.cancel(job)

    async def _finish(self, job: Job) -> bool:
        assert job.ending is not None
        ending = job.ending
        result = job.result() if ending.state == "finished" else None
        take([job])
        try:
            accepted = await self._queue.finish(
                job.claimed, job.in_flight, result, state=ending.state, error=ending.error
            )
        except LogBehind:
            self._owner.out_of_step(job)
            return True
        except BROKER_ERRORS as error:
            if blames_request(error):
                self._owner.lost(job, f"Redis refuses its end: {error}")
                return True
            self._broker.away("finish", error)
            self.touch(job)
            return False
        if accepted:
            self._owner.ended(job)
        elif job.stage is not Stage.GONE:
            self._owner.fenced(job)
        return True


def _sorted(jobs: Iterable[Job]) -> tuple[list[Job], list[Job]]:
    """Jobs to finish, and those to emit for; suspended ones are neither."""
    ended: list[Job] = []
    logging: list[Job] = []
    for job in jobs:
        if job.suspended:
            continue
        if job.stage in _LOGGING:
            logging.append(job)
        elif job.stage is Stage.ENDED:
            ended.append(job)
    return ended, logging


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended, more than once: a client library may take one cancel for
    its own. Who waits here may be cancelled meanwhile, and waits on."""
    while left := {task for task in tasks if not task.done()}:
        for task in left:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait(left, timeout=0.2)
