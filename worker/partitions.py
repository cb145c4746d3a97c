"""How a claim is shared out over the partitions of a cluster: urgency first, then turn by turn.

A look at every partition, all at once, says how many jobs of each class wait there. What is
claimed then is claimed only where it waits, all at once again: an urgent job of any partition goes
before a less urgent one of any other, and a claim takes as long over sixteen partitions as over
two. One that cannot be reached keeps nobody from the others, nor does one that says nothing: once
another has answered, it gets as long again and LOOK_S, and then it is not asked for REST_S.

Invariant: what is allotted is no more than was asked for, and no more than waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.keys import PRIORITIES
from tokenfleet.worker.broker import BROKER_ERRORS
from tokenfleet.worker.claims import ClaimedJob
from tokenfleet.worker.priorities import ClassOrder, Offer

Waiting = Mapping[int, Mapping[str, int]]
"""Jobs that wait, by partition and priority."""

Result = TypeVar("Result")

LOOK_S = 1.0
"""What is given up here has done no harm, and is asked again in a later look."""

REST_S = 5.0
"""So long claims do not wait for a part of a cluster that says nothing."""


class PartitionSilent(BrokerUnavailable):
    """It has not answered a look as the others have."""


class Silences:
    """Which partitions are not asked for now.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[int, float] = {}

    def asked(self, partitions: Sequence[int]) -> list[int]:
        """Those to look into; all where none is left."""
        now = self._clock()
        return [p for p in partitions if self._until.get(p, now) <= now] or list(partitions)

    def note(self, unseen: Mapping[int, Exception]) -> None:
        """What a look has not seen, and why."""
        until = self._clock() + REST_S
        self._until |= {p: until for p, why in unseen.items() if isinstance(why, PartitionSilent)}


@dataclass(frozen=True, slots=True)
class Taken:
    """What one call to one partition took."""

    by_class: Counter[str]
    """Jobs, those that nobody can read included."""
    jobs: list[ClaimedJob]


class Calls(Protocol):
    """What is asked of one partition; see taker.py."""

    async def peek(self, partition: int, most: int) -> Mapping[str, int]: ...
    async def claim_in(self, partition: int, offers: Sequence[Offer], count: int) -> Taken: ...


@dataclass(slots=True)
class Spread:
    """One claim of up to `count` jobs over several partitions."""

    calls: Calls
    order: ClassOrder
    silences: Silences
    count: int
    jobs: list[ClaimedJob] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    """Of partitions that were not reached."""
    cut_short: bool = False
    """Whether a claim's reply did not come: it may have taken jobs."""

    async def run(self, partitions: Sequence[int], most_at_once: int) -> None:
        """Rounds, in the order of `partitions`; each brings a job or gives up a partition."""
        left = self.silences.asked(partitions)
        while left and (want := min(self.count - len(self.jobs), most_at_once)) > 0:
            peek = partial(self.calls.peek, most=want)
            waiting, unseen = await look(peek, left, self.silences)
            self.errors += unseen.values()
            shares = allot(self.order.plan(want), waiting, want)
            if not shares:
                return
            taken, lost = await self._claim(shares, want)
            full = all(taken.get(p) == sum(share.values()) for p, share in shares.items())
            if full and _total(shares) < want:  # all that was seen; at `want` a look ends
                return
            left = [p for p in left if p not in unseen and p not in lost and taken.get(p, 1)]

    async def _claim(
        self, shares: Waiting, want: int
    ) -> tuple[dict[int, int], dict[int, Exception]]:
        """Returns how many jobs each partition gave, and the errors of those that gave no reply."""
        calls = {
            p: self.calls.claim_in(p, [Offer(c, share[c]) for c in PRIORITIES if c in share],
                                   sum(share.values()))
            for p, share in shares.items()
        }  # fmt: skip
        found, lost = await settled(calls)
        self.errors += lost.values()
        self.cut_short = self.cut_short or bool(lost)
        by_class = sum((one.by_class for one in found.values()), Counter[str]())
        jobs = [job for p in shares if p in found for job in found[p].jobs]
        self.jobs += self.order.settle(jobs, by_class, count=want)
        return {p: one.by_class.total() for p, one in found.items()}, lost


async def look(
    ask: Callable[[int], Awaitable[Result]], partitions: Sequence[int], silences: Silences
) -> tuple[dict[int, Result], dict[int, Exception]]:
    """Returns what the partitions that have answered said, and why the others have not."""
    loop, limits = asyncio.get_running_loop(), set[asyncio.Timeout]()
    began, until = loop.time(), None

    async def one(partition: int) -> Result:
        nonlocal until
        try:
            async with asyncio.timeout_at(until) as limit:
                limits.add(limit)
                found = await ask(partition)
        except TimeoutError:
            silent = f"partition {partition} has not answered as the others have"
            raise PartitionSilent(silent) from None
        finally:
            limits.discard(limit)
        if until is None:
            until = 2 * loop.time() - began + LOOK_S
            for other in limits:
                other.reschedule(until)
        return found

    found, unseen = await settled({p: one(p) for p in partitions})
    silences.note(unseen)
    return found, unseen


def allot(offers: Sequence[Offer], waiting: Waiting, count: int) -> dict[int, dict[str, int]]:
    """How many jobs of each class to claim in each partition, `count` in all.

    The offers are served one after the other; within one, the partitions take turns in the order
    of `waiting`. Partitions that get nothing are left out.
    """
    left = {partition: dict(classes) for partition, classes in waiting.items()}
    shares: dict[int, dict[str, int]] = {}
    for offer in offers:
        most = min(offer.count, count)
        while most > 0:
            turn = [p for p, classes in left.items() if classes.get(offer.priority, 0) > 0][:most]
            if not turn:
                break
            for partition in turn:
                left[partition][offer.priority] -= 1
                share = shares.setdefault(partition, {})
                share[offer.priority] = share.get(offer.priority, 0) + 1
            most -= len(turn)
            count -= len(turn)
    return shares


def _total(waiting: Waiting) -> int:
    return sum(sum(classes.values()) for classes in waiting.values())


async def settled(
    calls: Mapping[int, Awaitable[Result]],
) -> tuple[dict[int, Result], dict[int, Exception]]:
    """Results and the errors of those that Redis did not answer, once all have ended.

    Raises any other error.
    """
    replies = await asyncio.gather(*calls.values(), return_exceptions=True)
    found: dict[int, Result] = {}
    errors: dict[int, Exception] = {}
    for partition, reply in zip(calls, replies):
        if isinstance(reply, BROKER_ERRORS):
            errors[partition] = reply
        elif isinstance(reply, BaseException):
            raise reply
        else:
            found[partition] = reply
    return found, errors
