"""Jobs that leave this worker without having ended, and jobs that Redis has to be told of again.

All of it waits for Redis while it must, but never beyond the leases: then the reapers have the
jobs, and this worker drops them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import structlog

from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.claims import by_partition, together
from tokenfleet.worker.jobs import Job, Stage
from tokenfleet.worker.publisher import Publisher
from tokenfleet.worker.queue import ClaimedJob, JobQueue

log = structlog.get_logger()


class Owner(Protocol):
    """Who keeps the books of the jobs."""

    def lost(self, job: Job, reason: str) -> None: ...
    def leave(self, job: Job, state: str) -> None: ...
    def put_back(self, job: Job) -> None: ...


class HandBack:
    """Talks to the queue about jobs that are not to end here.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        queue: JobQueue,
        broker: Broker,
        publisher: Publisher,
        owner: Owner,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._broker = broker
        self._publisher = publisher
        self._owner = owner
        self._clock = clock

    async def give(
        self, blamed: Sequence[Job], spared: Sequence[Job], why: str, *, preempted: bool = False
    ) -> None:
        """Log what the jobs have made, then hand them over: the blamed ones with a failure.

        A job that ends meanwhile stays, for its end to be published. `preempted`: the spared ones
        make way for others. Jobs of one partition do not wait for the server of another.
        """
        of = by_partition([*blamed, *spared], lambda job: job.id)
        calls = [
            self._give(
                partition,
                [job for job in jobs if job in blamed],
                [job for job in jobs if job not in blamed],
                why,
                preempted=preempted,
            )
            for partition, jobs in of.items()
        ]
        await together(calls)

    async def _give(
        self,
        partition: int,
        blamed: Sequence[Job],
        spared: Sequence[Job],
        why: str,
        *,
        preempted: bool,
    ) -> None:
        async with self._publisher.still(partition) as publish:
            blamed, spared = _unended(blamed), _unended(spared)

            async def fail() -> None:
                await publish()  # what an unreachable Redis has not got yet
                await self._fail(_told(blamed), why)

            async def release() -> None:
                await publish()
                await self._release(_told(spared), why, preempted=preempted)

            await self._until_reached(fail, blamed)
            await self._until_reached(release, spared)

    async def swap(self, victims: Sequence[Job]) -> list[ClaimedJob]:
        """Let more urgent jobs have the places of `victims`, as many as wait, and return them.

        The victims that lose theirs leave with their log. Raises what the queue's swap raises.
        """
        offered = {job.id: job for job in _unended(victims)}

        @asynccontextmanager
        async def hold(partition: int) -> AsyncIterator[set[str]]:
            gone: set[str] = set()
            async with self._publisher.still(partition):
                yield gone
                for job_id in gone:
                    self._owner.put_back(offered[job_id])

        claimed, _ = await self._queue.swap([job.claimed for job in offered.values()], hold)
        return claimed

    async def give_up_end(self, job: Job, why: str) -> None:
        """Hand over a job whose tokens Redis will not take, ended or not."""
        async with self._publisher.still(job.partition):
            await self._until_reached(lambda: self._release([job], why), [job])

    async def offer(self, job: Job) -> ClaimedJob | None:
        """Offer a running job to a Redis that may have forgotten it; None: it knows better."""
        again: list[ClaimedJob | None] = []
        await self._publisher.settled(job.partition)

        async def adopt() -> None:
            again.append(await self._queue.adopt(job.claimed, job.history))

        await self._until_reached(adopt, [job], once=True)
        return again[0] if again else None

    async def _fail(self, jobs: Sequence[Job], why: str) -> None:
        for job in _present(jobs):
            state = await self._queue.fail(job.claimed, "engine_died", why, retryable=True)
            log.warning(
                "job_attempt_failed", job_id=job.id, attempt=job.claimed.attempt,
                offset=job.logged, state=state, reason=why,
            )  # fmt: skip
            self._owner.leave(
                job, state.value if state is not None and state.terminal else "released"
            )

    async def _release(self, jobs: Sequence[Job], why: str, *, preempted: bool = False) -> None:
        leaving = _present(jobs)
        await self._queue.release([job.claimed for job in leaving], why, preempted=preempted)
        for job in leaving:
            log.info(
                "job_released", job_id=job.id, attempt=job.claimed.attempt, offset=job.logged,
                reason=why,
            )  # fmt: skip
            self._owner.leave(job, "released")

    async def _until_reached(
        self, call: Callable[[], Awaitable[None]], jobs: Sequence[Job], *, once: bool = False
    ) -> None:
        """Repeat until Redis has answered (`once`) and no job is left, or every lease is over."""
        while _present(jobs):
            try:
                await call()
                if once or not _present(jobs):
                    return
            except BROKER_ERRORS as error:
                self._broker.away("hand back", error)
            await self._broker.pause()
            for job in _present(jobs):
                if job.lease_until <= self._clock():
                    self._owner.lost(job, "the lease ran out")


def _unended(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.stage not in (Stage.ENDED, Stage.GONE)]


def _told(jobs: Sequence[Job]) -> list[Job]:
    """Those of which Redis has all that there is to log."""
    return [job for job in jobs if job.suspended or not job.dirty]


def _present(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.stage is not Stage.GONE]
