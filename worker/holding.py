"""What becomes of jobs that a worker holds: they are kept, handed back, or have failed.

Invariant: nothing is changed for a job whose attempt is not the one it was claimed with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.keys import partition_of
from tokenfleet.producer.protocol import State
from tokenfleet.producer.scripts import Script, load
from tokenfleet.worker.claims import FENCED, ClaimedJob, Terms, by_partition, text, together
from tokenfleet.worker.job_log import PATIENCE_S

RENEW, RELEASE, FAIL = (
    load("tokenfleet.worker.lua", name) for name in ("renew", "release", "fail")
)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0


class Holding:
    """Does so for one worker. JobQueue has the contracts of the methods.

    Args:
        uniform: draws the jitter of a back-off, in [0, 1).
    """

    def __init__(
        self,
        connection: Connection,
        terms: Terms,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._connection = connection
        self._terms = terms
        self._uniform = uniform

    async def renew(self, jobs: Iterable[ClaimedJob]) -> frozenset[str]:
        """Extend the leases. Returns the ids that are not this worker's any more."""
        groups = by_partition(list(jobs), lambda job: job.id)
        found = await together([self._renew_in(*group) for group in groups.items()])
        return frozenset().union(*found)

    async def _renew_in(self, partition: int, group: Sequence[ClaimedJob]) -> set[str]:
        keys = [self._connection.keys(partition).job(job.id) for job in group]
        args: list[Any] = [self._terms.worker_id]
        args += [part for job in group for part in (job.id, job.attempt)]
        codes = await self._run(RENEW, partition, keys, args)
        return {job.id for job, code in zip(group, codes) if code & FENCED}

    async def release(self, jobs: Iterable[ClaimedJob], *, preempted: bool) -> frozenset[str]:
        """Hand jobs back unharmed. Returns the ids handed back."""
        groups = by_partition(list(jobs), lambda job: job.id)
        found = await together(
            [self._release_in(*group, preempted=preempted) for group in groups.items()]
        )
        return frozenset().union(*found)

    async def put_back_in(self, partition: int, victims: Sequence[ClaimedJob]) -> set[str]:
        """Hand back those of one partition, which make way for others."""
        return await self._release_in(partition, victims, preempted=True)

    async def _release_in(
        self, partition: int, group: Sequence[ClaimedJob], *, preempted: bool
    ) -> set[str]:
        keys = [self._connection.keys(partition).job(job.id) for job in group]
        args: list[Any] = [*self._terms.ttls, int(preempted)]
        args += [part for job in group for part in (job.id, job.attempt)]
        done = await self._run(RELEASE, partition, keys, args)
        return {job.id for job, mine in zip(group, done) if mine}

    async def fail(
        self,
        job_id: str,
        attempt: int,
        code: str,
        message: str,
        *,
        retryable: bool,
        bury: bool = False,
    ) -> State | None:
        """An attempt went wrong. Returns the job's state now; None: it is another attempt's."""
        names = self._connection.keys(partition_of(job_id))
        args: list[Any] = [job_id, attempt, code, message, int(retryable), self._terms.max_failures]
        args += [*self._terms.ttls, int(FIRST_BACKOFF_S * 1000), int(LONGEST_BACKOFF_S * 1000)]
        args += [self._uniform(), int(bury)]
        keys = [names.job(job_id), names.events(job_id)]
        state = text(await self._run(FAIL, names.partition, keys, args))
        return State(state) if state else None

    async def bury(self, job_id: str, attempt: int, reason: str) -> None:
        """Dead-letter a job that cannot be read."""
        await self.fail(job_id, attempt, "undecodable", reason, retryable=False, bury=True)

    async def _run(self, script: Script, partition: int, keys: list[str], args: list[Any]) -> Any:
        return await self._connection.run(script, partition, keys, args, patience_s=PATIENCE_S)
