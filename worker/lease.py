"""Keeps this worker's leases alive for as long as its engine is, and gives them up when it is not.

`Job.lease_until` never lies beyond what Redis has granted: it is counted from before the call that
renewed it. A job whose time is over is dropped here, before anyone else can have started it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.claims import by_partition
from tokenfleet.worker.jobs import Job
from tokenfleet.worker.queue import JobQueue
from tokenfleet.worker.roster import Roster

RENEWALS_PER_LEASE = 3


class Loser(Protocol):
    """Who acts when a job is no longer ours."""

    def lost(self, job: Job, reason: str) -> None: ...
    def fenced(self, job: Job) -> None: ...


class LeaseKeeper:
    """Renews all owned jobs a few times per lease.

    Args:
        healthy: whether the engine does what it should; while not, nothing is renewed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        queue: JobQueue,
        broker: Broker,
        roster: Roster,
        owner: Loser,
        *,
        lease_s: float,
        healthy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._broker = broker
        self._roster = roster
        self._owner = owner
        self._lease_s = lease_s
        self._healthy = healthy
        self._clock = clock

    async def run(self) -> None:
        """Renew until cancelled: a few times per lease, and as soon as Redis is back from an
        outage. It may have forgotten jobs that have nothing to publish yet."""
        while True:
            pause_s = self._lease_s / RENEWALS_PER_LEASE * random.uniform(0.8, 1.0)
            rest_s = min(1.0, pause_s / 10)  # one outage may follow the other
            await asyncio.sleep(rest_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s - rest_s):
                    await self._broker.back.wait()
            self._broker.back.clear()
            if self._healthy():
                while not await self.renew():
                    await self._broker.pause()
            self.drop_overdue()

    async def renew(self) -> bool:
        """One call for all jobs of a partition. Returns False when Redis was not reached for all of
        them and there is hope yet.

        A part of a cluster that is away costs the jobs of the others nothing.
        """
        groups = by_partition(self._roster, lambda job: job.id)
        reached = await asyncio.gather(*(self._renew(group) for group in groups.values()))
        return all(reached) or not len(self._roster)

    async def _renew(self, jobs: list[Job]) -> bool:
        asked, claimed = self._clock(), [job.claimed for job in jobs]
        try:
            async with asyncio.timeout(self._lease_s / RENEWALS_PER_LEASE):
                lost = await self._queue.renew(claimed)
        except BROKER_ERRORS as error:  # TimeoutError is one of them
            self._broker.away("renew", error)
            self.drop_overdue()
            return False
        self._broker.reached()
        for job, renewed in zip(jobs, claimed):
            if job.claimed is not renewed:
                continue  # Redis had forgotten it, and was given it again meanwhile
            if job.id not in lost:
                job.lease_until = asked + self._lease_s
            elif job.ending is None:  # one that ends is settled by its finish
                self._owner.fenced(job)
        return True

    def drop_overdue(self) -> None:
        """Stop every job whose lease has run out: someone else may have it now."""
        now = self._clock()
        for job in self._roster:
            if job.lease_until <= now:
                self._owner.lost(job, "the lease ran out")
