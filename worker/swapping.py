"""Urgent jobs in the places of batch jobs, each of whatever partition.

Where both are of one partition, that is one move of one script. No script reaches two partitions:
there the urgent job is claimed first and the batch job released then, so that nobody is put back in
vain; for the time of that call the worker holds one job more than it has places.

Invariant: of the victims no more are put back than urgent jobs were taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tokenfleet.producer.keys import PRIORITIES, partition_of
from tokenfleet.worker.claims import ClaimedJob, by_partition
from tokenfleet.worker.partitions import Silences, allot, look, settled
from tokenfleet.worker.priorities import Offer

URGENT = PRIORITIES[:-1]
"""Classes that jobs of the last one make way for."""

Hold = Callable[[int], AbstractAsyncContextManager[set[str]]]
"""Within the block a partition's events are in its log and no more are sent; whoever puts jobs back
there adds their ids to what it is given."""


class Calls(Protocol):
    """What is asked of one partition; see taker.py and queue.py."""

    async def peek_urgent(self, partition: int, most: int) -> Mapping[str, int]: ...
    async def claim_urgent(self, partition: int, count: int) -> list[ClaimedJob]: ...
    async def swap_in(
        self, partition: int, victims: Sequence[ClaimedJob]
    ) -> tuple[list[ClaimedJob], set[str]]: ...
    async def put_back_in(self, partition: int, victims: Sequence[ClaimedJob]) -> set[str]: ...


@dataclass(slots=True)
class Swap:
    """One swap over several partitions."""

    calls: Calls
    silences: Silences
    hold: Hold
    jobs: list[ClaimedJob] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    """Victims that were put back."""
    errors: list[Exception] = field(default_factory=list)
    """Of partitions that were not reached."""
    cut_short: bool = False
    """Whether a reply did not come that may have brought jobs."""

    async def run(self, victims: Sequence[ClaimedJob], partitions: Sequence[int]) -> None:
        """Take as many jobs as wait, the most urgent of all partitions, for the first victims.

        A partition that is away keeps its victims.
        """
        asked = self.silences.asked(partitions)
        peek = partial(self.calls.peek_urgent, most=len(victims))
        waiting, unseen = await look(peek, asked, self.silences)
        self.errors += unseen.values()
        able = [one for one in victims if partition_of(one.id) in waiting]
        shares = allot([Offer(name, len(able)) for name in URGENT], waiting, len(able))
        wanted = {partition: sum(share.values()) for partition, share in shares.items()}
        beside, others, left = pair(able, wanted)
        swaps = {p: self._swap_in(p, jobs) for p, jobs in beside.items()}
        claims = {p: self.calls.claim_urgent(p, count) for p, count in left.items()}
        (_, failed), (claimed, lost) = await asyncio.gather(settled(swaps), settled(claims))
        self.errors += [*failed.values(), *lost.values()]
        self.cut_short = bool(failed or lost)
        found = [job for jobs in claimed.values() for job in jobs]
        self.jobs += found
        groups = by_partition(others[: len(found)], lambda job: job.id)
        await settled({p: self._put_back(p, jobs) for p, jobs in groups.items()})

    async def _swap_in(self, partition: int, victims: Sequence[ClaimedJob]) -> None:
        async with self.hold(partition) as gone:
            jobs, put_back = await self.calls.swap_in(partition, victims)
            gone |= put_back
        self.jobs += jobs
        self.gone |= put_back

    async def _put_back(self, partition: int, victims: Sequence[ClaimedJob]) -> None:
        """One that cannot be put back now makes way once the worker has looked at what it holds."""
        async with self.hold(partition) as gone:
            put_back = await self.calls.put_back_in(partition, victims)
            gone |= put_back
        self.gone |= put_back


def pair(
    victims: Sequence[ClaimedJob], wanted: Mapping[int, int]
) -> tuple[dict[int, list[ClaimedJob]], list[ClaimedJob], dict[int, int]]:
    """Who makes way for whom, first victims first: those that do so for a job of their own
    partition, those that do so for one of another, and how many of these there are by theirs."""
    beside: dict[int, list[ClaimedJob]] = {}
    others: list[ClaimedJob] = []
    left = dict(wanted)
    for job in victims[: sum(wanted.values())]:
        partition = partition_of(job.id)
        if left.get(partition, 0) > 0:
            left[partition] -= 1
            beside.setdefault(partition, []).append(job)
        else:
            others.append(job)
    return beside, others, {partition: count for partition, count in left.items() if count}


@asynccontextmanager
async def unheld(_partition: int) -> AsyncIterator[set[str]]:
    """For victims that send no events."""
    yield set()
