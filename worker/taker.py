"""How a worker comes to hold jobs: claims in the order of the classes, and swaps for urgent ones.

Invariant: of each call here one reply is read, or none; what a lost reply had brought is in this
worker's name in Redis, and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog
from redis.exceptions import NoScriptError

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnavailable, KeyOccupied, UndecodableJob
from tokenfleet.producer.keys import PRIORITIES
from tokenfleet.producer.scripts import Script, load
from tokenfleet.worker.broker import BROKER_ERRORS
from tokenfleet.worker.claims import ClaimedJob, NothingTaken, Terms, claimed_job, text
from tokenfleet.worker.doorbell import BLOCK_MS, Doorbell
from tokenfleet.worker.partitions import Silences, Spread, Taken
from tokenfleet.worker.priorities import ClassOrder, Offer
from tokenfleet.worker.standing import Standing, StandingClaim
from tokenfleet.worker.swapping import URGENT, Hold, Swap

CLAIM, SWAP, PEEK = (
    load("tokenfleet.worker.lua", name, "taking") for name in ("claim", "swap", "peek")
)

MOST_PER_CLAIM = 128
MOST_OF_LEASE = 0.125
"""A claim waits at the server for no larger part of the lease: that is counted from its sending."""
log = structlog.get_logger()

Bury = Callable[[str, int, str], Awaitable[Any]]
PutBack = Callable[[int, Sequence[ClaimedJob]], Awaitable[set[str]]]


class Taker:
    """Takes jobs of one model for one worker. Never repeated: a repeated claim would take twice.

    Args:
        bury: dead-letters a job that nobody can read: id, attempt, reason.
        put_back: releases jobs of a partition that make way for others; returns the ids released.
        regrouped: told of a partition whose groups were gone.
    """

    def __init__(
        self,
        connection: Connection,
        terms: Terms,
        *,
        order: ClassOrder,
        silences: Silences,
        bury: Bury,
        put_back: PutBack,
        regrouped: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._terms = terms
        self._order = order
        self._bury = bury
        self._put_back = put_back
        self._regrouped = regrouped
        self._silences = silences
        self._bell = Doorbell(connection, "bell")
        self._urgent_bell = Doorbell(connection, "urgent bell")
        self._next_due_ms: int | None = None
        self._now_ms = 0
        self._more = False
        """Whether a queue was left before its end."""
        self._foreign: dict[int, dict[str, str]] = {}
        """By partition: keys that are not ours, and what lies there."""
        self.cut_short = False
        """Whether the last call may have taken more than it brought: a reply did not come."""

    async def claim(self, count: int, partitions: Sequence[int]) -> list[ClaimedJob]:
        """Take up to `count` waiting jobs.

        Raises BrokerUnavailable only when nothing was claimed: what came before the connection
        broke is returned.
        """
        self._next_due_ms, self.cut_short, self._more = None, True, False
        if len(partitions) > 1:
            return await self._claim_spread(count, partitions)
        jobs: list[ClaimedJob] = []
        try:
            while (want := min(count - len(jobs), MOST_PER_CLAIM)) > 0:
                taken = await self.claim_in(partitions[0], self._order.plan(want), want)
                jobs += self._order.settle(taken.jobs, taken.by_class, count=want)
                if taken.by_class.total() < want:
                    break
        except BrokerUnavailable:
            if not jobs:
                raise
            return jobs
        self.cut_short = False
        return jobs

    async def _claim_spread(self, count: int, partitions: Sequence[int]) -> list[ClaimedJob]:
        spread = Spread(self, self._order, self._silences, count)
        await spread.run(partitions, MOST_PER_CLAIM)
        self.cut_short = spread.cut_short
        if spread.errors and not spread.jobs:
            raise _error(spread)
        return spread.jobs

    async def swap(
        self, victims: Sequence[ClaimedJob], partitions: Sequence[int], hold: Hold
    ) -> tuple[list[ClaimedJob], frozenset[str]]:
        """Take jobs of more urgent classes, each for one of `victims`, which goes back.

        Returns the jobs taken and the ids put back; raises as claim does.
        """
        self.cut_short = True
        if len(partitions) == 1:
            async with hold(partitions[0]) as gone:
                jobs, put_back = await self.swap_in(partitions[0], victims)
                gone |= put_back
            self.cut_short = False
            return jobs, frozenset(put_back)
        swap = Swap(self, self._silences, hold)
        await swap.run(victims, partitions)
        self.cut_short = swap.cut_short
        if swap.errors and not swap.jobs:
            raise _error(swap)
        return swap.jobs, frozenset(swap.gone)

    async def wait(self, timeout_s: float) -> bool:
        """Return when a job may be there, or the time is over. Takes nothing."""
        if self._more:
            self._more = False
            return True
        return await self._bell.wait(self._until_due(timeout_s))

    def stand(self, count: int, timeout_s: float) -> Standing | None:
        """A claim of up to `count` jobs that waits at the server until one may be there, or the
        time is over. None where `wait` and `claim` must do: there are several partitions, or the
        last claim left something, or was never answered."""
        connection = self._connection
        if self._more or connection.partitions > 1 or connection.cluster or not self._bell.lasts(0):
            return None
        line = f"standing {self._terms.model_name}"
        claim = StandingClaim(connection, connection.keys(0), self._terms.worker_id, line)
        most_ms = min(BLOCK_MS, int(self._terms.lease_ms * MOST_OF_LEASE))
        wait_ms = min(most_ms, int(self._until_due(timeout_s) * 1000))
        call = partial(self._claim_standing, claim, count, max(1, wait_ms))
        return Standing(call, claim.withdraw)

    async def _claim_standing(
        self, claim: StandingClaim, count: int, block_ms: int
    ) -> list[ClaimedJob]:
        self.cut_short = True
        offers = self._order.plan(count)
        keys, args = self._call(0, offers, count, claim.ticket)
        try:
            reply = await claim.run(self._bell.lasts(0), block_ms, CLAIM, keys, args)
        except NoScriptError:
            return await self.claim(count, (0,))
        self.cut_short = False
        if reply is None:
            return []
        taken = await self._taken(0, keys, count, reply)
        return self._order.settle(taken.jobs, taken.by_class, count=count)

    def _until_due(self, timeout_s: float) -> float:
        """The time, or less where a job comes due before."""
        due_ms, self._next_due_ms = self._next_due_ms, None
        if due_ms is None:
            return timeout_s
        return min(timeout_s, max(0.0, (due_ms - self._now_ms) / 1000))

    async def wait_urgent(self, timeout_s: float) -> bool:
        """Return when there may be a job to swap for, or the time is over."""
        return await self._urgent_bell.wait(timeout_s)

    async def aclose(self) -> None:
        """Stop waiting."""
        await self._bell.aclose()
        await self._urgent_bell.aclose()

    async def peek(self, partition: int, most: int) -> dict[str, int]:
        """How many jobs wait in each class of a partition; none is counted beyond `most`."""
        keys = self._keys(partition, PRIORITIES)
        now, due, regrouped, lasts, counts, foreign = await self._run(PEEK, partition, keys, [most])
        self._noted_due(due)
        self._noted(self._bell, partition, now, regrouped, keys, lasts)
        self._noted_foreign(partition, foreign)
        return dict(zip(PRIORITIES, counts))

    async def claim_in(self, partition: int, offers: Sequence[Offer], count: int) -> Taken:
        """One call."""
        keys, args = self._call(partition, offers, count)
        return await self._taken(
            partition, keys, count, await self._run(CLAIM, partition, keys, args)
        )

    def _call(
        self, partition: int, offers: Sequence[Offer], count: int, ticket: str = ""
    ) -> tuple[list[str], list[Any]]:
        """Keys and arguments of a claim."""
        keys = self._keys(partition, [offer.priority for offer in offers])
        args = [self._terms.worker_id, self._terms.lease_ms, count, *self._terms.ttls, ticket]
        return keys, [*args, *(offer.count for offer in offers)]

    async def _taken(self, partition: int, keys: list[str], count: int, reply: Any) -> Taken:
        """What a claim's reply says."""
        now, due, regrouped, lasts, found, foreign = reply
        self._noted_due(due)
        if self._connection.partitions == 1:
            self._noted_foreign(partition, foreign)
            self._noted(self._bell, partition, now, regrouped, keys, lasts)
        else:  # a look at all classes said what to wait behind, and which keys are not ours
            self._noted(self._bell, partition, now, regrouped, keys, [])
            self._more = self._more or (len(found) < count and not lasts)
        by_class = Counter(text(raw[5]) for raw in found)
        return Taken(by_class, await self._decode(found, now))

    async def peek_urgent(self, partition: int, most: int) -> dict[str, int]:
        """The same of the classes that others make way for."""
        keys = self._keys(partition, URGENT)
        now, _, regrouped, lasts, counts, _ = await self._run(PEEK, partition, keys, [most])
        self._noted(self._urgent_bell, partition, now, regrouped, keys, lasts)
        return dict(zip(URGENT, counts))

    async def claim_urgent(self, partition: int, count: int) -> list[ClaimedJob]:
        """One call for jobs of those classes."""
        offers = [Offer(priority, count) for priority in URGENT]
        return (await self.claim_in(partition, offers, count)).jobs

    async def swap_in(
        self, partition: int, victims: Sequence[ClaimedJob]
    ) -> tuple[list[ClaimedJob], set[str]]:
        """One call; the victims are of this partition."""
        keys = self._keys(partition, URGENT)
        args = [self._terms.worker_id, self._terms.lease_ms, *self._terms.ttls]
        args += [part for job in victims for part in (job.id, job.attempt)]
        reply = await self._run(SWAP, partition, keys, args)
        now, regrouped, lasts, found, gone, _ = reply
        self._noted(self._urgent_bell, partition, now, regrouped, keys, lasts)
        return await self._decode(found, now), {text(job_id) for job_id in gone}

    async def put_back_in(self, partition: int, victims: Sequence[ClaimedJob]) -> set[str]:
        """Release them; returns the ids released."""
        return await self._put_back(partition, victims)

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

    def _noted_due(self, due_ms: int) -> None:
        if due_ms >= 0:
            self._next_due_ms = min(self._next_due_ms or due_ms, due_ms)

    def _noted_foreign(self, partition: int, found: Sequence[Sequence[bytes]]) -> None:
        """Say once of each key that it is not ours, and once that it is again."""
        now = {text(key): text(kind) for key, kind, _ in found}
        before, self._foreign[partition] = self._foreign.get(partition, {}), now
        if now == before:
            return
        for key, kind, wanted in found:
            if text(key) not in before:
                problem = str(KeyOccupied(text(key), text(kind), text(wanted)))
                log.warning("key_occupied", key=text(key), problem=problem)
        for name in before.keys() - now.keys():
            log.info("key_free_again", key=name)

    async def _decode(self, found: Sequence[Sequence[Any]], now_ms: int) -> list[ClaimedJob]:
        """The jobs; one that nobody can read is dead-lettered."""
        jobs = []
        for raw in found:
            try:
                jobs.append(claimed_job(raw, now_ms))
            except UndecodableJob as error:
                with suppress(*BROKER_ERRORS):  # its lease ends then, and another worker says so
                    await self._bury(text(raw[0]), raw[1], str(error))
        return jobs

    def _keys(self, partition: int, priorities: Sequence[str]) -> list[str]:
        names, model = self._connection.keys(partition), self._terms.model_name
        pairs = [(names.front(model, p), names.queue(model, p)) for p in priorities]
        return [*(key for pair in pairs for key in pair), names.bell(model)]

    async def _run(self, script: Script, partition: int, keys: list[str], args: list[Any]) -> Any:
        return await self._connection.run(script, partition, keys, args, patience_s=0.0, often=True)


def _error(call: Spread | Swap) -> Exception:
    """Why a call over several partitions has brought nothing."""
    return call.errors[0] if call.cut_short else NothingTaken(str(call.errors[0]))
