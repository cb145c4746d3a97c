"""Claims jobs for free slots: an idle worker waits for the bell, a full one for urgent jobs only.

A full worker lets jobs that are more urgent than its batch jobs have their places.

Claims are made one after the other by this loop alone. So between two of them no claim is in
flight, and what Redis holds in our name beyond the roster is what a lost reply left behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog

from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.claims import NothingTaken
from tokenfleet.worker.dispatch import Dispatcher
from tokenfleet.worker.jobs import Job
from tokenfleet.worker.partitions import PartitionSilent
from tokenfleet.worker.preemption import Seats
from tokenfleet.worker.queue import ClaimedJob, JobQueue
from tokenfleet.worker.roster import Roster
from tokenfleet.worker.standing import Standing

FIRST_PORTION = 2
"""Jobs of a pause's first claim; each claim after it takes twice as many. The engine works on the
first ones while the others are fetched and made ready."""

DOORBELL_S = 1.0
"""A job that comes due while the bell is silent (a delay, a retry) waits no longer than this."""

log = structlog.get_logger()


class Intake:
    """The claim loop. Closed, it takes nothing new; open again, it goes on."""

    def __init__(
        self,
        queue: JobQueue,
        broker: Broker,
        roster: Roster,
        dispatcher: Dispatcher,
        seats: Seats,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._broker = broker
        self._roster = roster
        self._dispatcher = dispatcher
        self._seats = seats
        self._clock = clock
        self._ask_urgent = True
        """Whether urgent jobs may wait that this worker has not asked for since it is full."""
        self._unsure = False
        """Whether there may be jobs in our name that we do not know: after a claim whose reply did
        not come. What an earlier process of the same name left is no such job: that process died,
        which its lease will tell, and which counts."""
        self._portion = FIRST_PORTION
        self._dry = False
        """Whether the queues were empty at the last claim; what has come since rings the bell."""
        self.last_claim: float | None = None
        """When Redis last answered a claim; monotonic."""
        self.draining = False
        """Whether nothing is claimed any more."""

    def drain(self) -> None:
        """Claim nothing from here on; `run` returns soon, and after any claim in flight."""
        self.draining = True
        self._roster.touch()

    async def run(self) -> None:
        """Claim until drained."""
        while not self.draining:
            if self._dispatcher.launcher.engine is None:
                await self._roster.change()
                continue
            if way := self._seats.to_make_way(self._roster):
                self._dispatcher.make_way(way)
            room = self._roster.room()
            if room > 0:
                self._ask_urgent = True
                self._dry = not await self._serve(room)
                if self._dry:
                    self._portion = FIRST_PORTION
            else:
                self._portion, self._dry = FIRST_PORTION, False
                await self._stay_full()

    async def _serve(self, room: int) -> bool:
        """Claim, and while nothing is there wait for it; returns whether more may be waiting."""
        if not self._dry:
            return await self._claim(room)
        most = min(room, FIRST_PORTION)
        if standing := self._queue.stand(most, DOORBELL_S):
            self._portion *= 2
            call = partial(self._listen, standing)
            return await self._take(call, most, more=room > most)
        await self._wait(self._queue.wait, self._nothing_else_to_do)
        return True

    async def _listen(self, standing: Standing) -> list[ClaimedJob]:
        """What a claim at the server brings; it is withdrawn when there is else to do here."""
        jobs = asyncio.ensure_future(standing.jobs())
        try:
            stays = True
            while stays and not jobs.done():
                change = asyncio.ensure_future(self._roster.change())
                await asyncio.wait((jobs, change), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                stays = self._nothing_else_to_do()
            if not jobs.done() and await standing.withdraw():
                return []
            return await jobs
        finally:
            jobs.cancel()

    async def _stay_full(self) -> None:
        """Swap for urgent jobs, or wait until one may be there or something changed here."""
        victims = self._seats.victims(self._roster)
        if not victims:
            await self._roster.change()
        elif self._ask_urgent:
            self._ask_urgent = await self._swap(victims)
        else:
            self._ask_urgent = await self._wait(self._queue.wait_urgent, lambda: False)

    def _nothing_else_to_do(self) -> bool:
        """Whether only the bell can bring work: the queues were empty, and there is room still."""
        waits = not self.draining and self._dispatcher.launcher.engine is not None
        return waits and self._roster.room() > 0 and not self._seats.to_make_way(self._roster)

    async def _claim(self, room: int) -> bool:
        """Returns whether more may be waiting."""
        most = min(room, self._portion)
        if self._queue.connection.partitions > 1:  # each claim looks into all of them first
            most = room
        self._portion *= 2
        return await self._take(lambda: self._queue.claim(most), most, more=room > most)

    async def _swap(self, victims: list[Job]) -> bool:
        """Returns whether more may be waiting."""
        return await self._take(lambda: self._dispatcher.swap(victims), len(victims), more=False)

    async def _take(
        self, call: Callable[[], Awaitable[list[ClaimedJob]]], most: int, *, more: bool
    ) -> bool:
        asked_at = self._clock()
        doubt = self._unsure and not await self._release_phantoms()
        if doubt and self._queue.connection.partitions == 1:
            await self._broker.pause()
            return True
        self._unsure = True
        try:
            claimed = await call()
        except BROKER_ERRORS as error:
            self._unsure = doubt or not isinstance(error, NothingTaken)
            self._broker.away("claim", error)
            await self._broker.pause()
            return True
        self._unsure = doubt or self._queue.cut_short
        self._broker.reached()
        self.last_claim = self._clock()
        full = len(claimed) >= most
        self._dispatcher.take(claimed, asked_at, more=more and full)
        return full

    async def _release_phantoms(self) -> bool:
        """Returns False where Redis was not reached: what is there is looked for again later.

        A part of a cluster that is away does not keep this worker from the others meanwhile.
        """
        try:
            released = await self._queue.release_phantoms([job.id for job in self._roster])
        except PartitionSilent:  # the others have answered, and whoever waits for that one says so
            return False
        except BROKER_ERRORS as error:
            self._broker.away("release phantoms", error)
            return False
        if released:
            log.warning("phantom_claims_released", jobs=sorted(released))
        return True

    async def _wait(
        self, ring: Callable[[float], Awaitable[bool]], stays: Callable[[], bool]
    ) -> bool:
        """Until a bell rings or it is time to look again, or jobs have left or begun here.

        `stays` says after a change of jobs whether to listen on all the same. Returns False when
        such a change ended the wait.
        """
        bell = asyncio.ensure_future(ring(DOORBELL_S))
        change = asyncio.ensure_future(self._roster.change())
        try:
            await asyncio.wait((bell, change), return_when=asyncio.FIRST_COMPLETED)
            while not bell.done() and stays():
                change = asyncio.ensure_future(self._roster.change())
                await asyncio.wait((bell, change), return_when=asyncio.FIRST_COMPLETED)
            if bell.done():
                bell.result()
            return bell.done()
        except BROKER_ERRORS as error:
            self._broker.away("doorbell", error)
            await self._broker.pause()
            return True
        finally:
            for task in (bell, change):
                task.cancel()
            await asyncio.gather(bell, change, return_exceptions=True)
