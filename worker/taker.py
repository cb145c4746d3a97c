"""How a worker comes to hold jobs: claims in the order of the classes, and swaps for urgent ones.

Invariant: of each call here one reply is read, or none; what a lost reply had brought is in this
worker's name in Redis, and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnavailable, UndecodableJob
from tokenfleet.producer.keys import PRIORITIES
from tokenfleet.producer.scripts import Script, load
from tokenfleet.worker.claims import ClaimedJob, by_partition, claimed_job, text
from tokenfleet.worker.doorbell import Doorbell
from tokenfleet.worker.priorities import ClassOrder

CLAIM = load("tokenfleet.worker.lua", "claim", "taking")
SWAP = load("tokenfleet.worker.lua", "swap", "taking")

MOST_PER_CLAIM = 128
URGENT = PRIORITIES[:-1]
"""Classes that jobs of the last one make way for."""

Bury = Callable[[str, int, str], Awaitable[Any]]


class Taker:
    """Takes jobs of one model for one worker. Never repeated: a repeated claim would take twice.

    Args:
        ttls: of results and logs, ms.
        bury: dead-letters a job that nobody can read: id, attempt, reason.
        regrouped: told of a partition whose groups were gone.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        worker_id: str,
        model_name: str,
        lease_ms: int,
        ttls: Sequence[int],
        order: ClassOrder,
        bury: Bury,
        regrouped: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._worker_id = worker_id
        self._model_name = model_name
        self._lease_ms = lease_ms
        self._ttls = list(ttls)
        self._order = order
        self._bury = bury
        self._regrouped = regrouped
        self._bell = Doorbell(connection)
        self._urgent_bell = Doorbell(connection)
        self._next_due_ms: int | None = None
        self._now_ms = 0
        self.cut_short = False
        """Whether the last call brought jobs, and then a reply did not come."""

    async def claim(self, count: int, partitions: Sequence[int]) -> list[ClaimedJob]:
        """Take up to `count` waiting jobs.

        Raises BrokerUnavailable only when nothing was claimed: what came before the connection
        broke is returned.
        """
        jobs: list[ClaimedJob] = []
        self._next_due_ms, self.cut_short = None, False
        try:
            for partition in partitions:
                while (want := min(count - len(jobs), MOST_PER_CLAIM)) > 0:
                    taken, found = await self._claim_in(partition, want)
                    jobs += found
                    if taken < want:
                        break
        except BrokerUnavailable:
            if not jobs:
                raise
            self.cut_short = True
        return jobs

    async def swap(
        self, victims: Sequence[ClaimedJob], partitions: Sequence[int]
    ) -> tuple[list[ClaimedJob], frozenset[str]]:
        """Take jobs of more urgent classes, each for one of `victims`, which goes back.

        A victim makes way for a job of its own partition. Returns the jobs taken and the ids put
        back; raises as claim does.
        """
        jobs: list[ClaimedJob] = []
        put_back: set[str] = set()
        self.cut_short = False
        groups = by_partition(victims, lambda job: job.id)
        try:
            for partition in partitions:
                if partition in groups:
                    found, gone = await self._swap_in(partition, groups[partition])
                    jobs += found
                    put_back |= gone
        except BrokerUnavailable:
            if not jobs:
                raise
            self.cut_short = True
        return jobs, frozenset(put_back)

    async def wait(self, timeout_s: float) -> bool:
        """Return when a job may be there, or the time is over. Takes nothing."""
        if self._next_due_ms is not None:
            timeout_s = min(timeout_s, max(0.0, (self._next_due_ms - self._now_ms) / 1000))
        self._next_due_ms = None
        return await self._bell.wait(timeout_s)

    async def wait_urgent(self, timeout_s: float) -> bool:
        """Return when there may be a job to swap for, or the time is over."""
        return await self._urgent_bell.wait(timeout_s)

    async def aclose(self) -> None:
        """Stop waiting."""
        await self._bell.aclose()
        await self._urgent_bell.aclose()

    async def _claim_in(self, partition: int, count: int) -> tuple[int, list[ClaimedJob]]:
        """One call. Returns how many jobs it took, and those that can be read."""
        offers = self._order.plan(count)
        keys = self._keys(partition, [offer.priority for offer in offers])
        args = [self._worker_id, self._lease_ms, count, *self._ttls]
        args += [offer.count for offer in offers]
        reply = await self._run(CLAIM, partition, keys, args)
        now, next_due, regrouped, lasts, found = reply
        if next_due >= 0:
            self._next_due_ms = min(self._next_due_ms or next_due, next_due)
        self._noted(self._bell, partition, now, regrouped, keys, lasts)
        earned = self._order.earned(count) if len(found) == count else {}
        self._order.claimed(Counter(text(raw[5]) for raw in found), count=count)
        return len(found), _by_right(await self._decode(found, now), earned)

    async def _swap_in(
        self, partition: int, victims: Sequence[ClaimedJob]
    ) -> tuple[list[ClaimedJob], set[str]]:
        keys = self._keys(partition, URGENT)
        args = [self._worker_id, self._lease_ms, *self._ttls]
        args += [part for job in victims for part in (job.id, job.attempt)]
        now, regrouped, lasts, found, gone = await self._run(SWAP, partition, keys, args)
        self._noted(self._urgent_bell, partition, now, regrouped, keys, lasts)
        return await self._decode(found, now), {text(job_id) for job_id in gone}

    def _noted(
        self,
        bell: Doorbell,
        partition: int,
        now_ms: int,
        regrouped: int,
        keys: list[str],
        lasts: list[bytes],
    ) -> None:
        self._now_ms = now_ms
        if regrouped:
            self._regrouped(partition)
        if lasts:
            bell.seen(partition, {key: text(last) for key, last in zip(keys, lasts)})

    async def _decode(self, found: Sequence[Sequence[Any]], now_ms: int) -> list[ClaimedJob]:
        """The jobs; one that nobody can read is dead-lettered."""
        jobs = []
        for raw in found:
            try:
                jobs.append(claimed_job(raw, now_ms))
            except UndecodableJob as error:
                with suppress(BrokerUnavailable):  # its lease ends then, and another worker says so
                    await self._bury(text(raw[0]), raw[1], str(error))
        return jobs

    def _keys(self, partition: int, priorities: Sequence[str]) -> list[str]:
        names, model = self._connection.keys(partition), self._model_name
        pairs = [(names.front(model, p), names.queue(model, p)) for p in priorities]
        return [*(key for pair in pairs for key in pair), names.bell(model)]

    async def _run(self, script: Script, partition: int, keys: list[str], args: list[Any]) -> Any:
        return await self._connection.run(script, partition, keys, args, patience_s=0.0)


def _by_right(jobs: list[ClaimedJob], earned: dict[str, int]) -> list[ClaimedJob]:
    """The same jobs; the first `earned` ones of each class are marked: others waited meanwhile."""
    left = Counter({priority: count for priority, count in earned.items() if count})
    if not left:
        return jobs
    marked = []
    for job in jobs:
        mine = left[job.priority] > 0
        left[job.priority] -= mine
        marked.append(replace(job, by_right=True) if mine else job)
    return marked
