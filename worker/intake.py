"""Claims jobs for free slots, and rings no bell: an idle worker waits, a full one does nothing.

Claims are made one after the other by this loop alone. So between two of them no claim is in
flight, and what Redis holds in our name beyond the roster is what a lost reply left behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.dispatch import Dispatcher
from tokenfleet.worker.queue import JobQueue
from tokenfleet.worker.roster import Roster

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
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._broker = broker
        self._roster = roster
        self._dispatcher = dispatcher
        self._clock = clock
        self._unsure = False
        """Whether there may be jobs in our name that we do not know: after a claim whose reply did
        not come. What an earlier process of the same name left is no such job: that process died,
        which its lease will tell, and which counts."""
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
            room = self._roster.room() if self._dispatcher.engine is not None else 0
            if room == 0:
                await self._roster.change()
            elif not await self._claim(room) and not self.draining:
                await self._wait()

    async def _claim(self, room: int) -> bool:
        """Returns whether more may be waiting."""
        asked_at = self._clock()
        try:
            if self._unsure:
                await self._release_phantoms()
            self._unsure = True
            claimed = await self._queue.claim(room)
        except BROKER_ERRORS as error:
            self._broker.away("claim", error)
            await self._broker.pause()
            return True
        self._unsure = False
        self._broker.reached()
        self.last_claim = self._clock()
        self._dispatcher.take(claimed, asked_at)
        return len(claimed) >= room

    async def _release_phantoms(self) -> None:
        released = await self._queue.release_phantoms([job.id for job in self._roster])
        if released:
            log.warning("phantom_claims_released", jobs=sorted(released))

    async def _wait(self) -> None:
        """Until the doorbell rings, or jobs have left: one of them may be due again soon."""
        bell = asyncio.ensure_future(self._queue.wait(DOORBELL_S))
        change = asyncio.ensure_future(self._roster.change())
        try:
            await asyncio.wait((bell, change), return_when=asyncio.FIRST_COMPLETED)
            if bell.done():
                bell.result()
        except BROKER_ERRORS as error:
            self._broker.away("doorbell", error)
            await self._broker.pause()
        finally:
            for task in (bell, change):
                task.cancel()
            await asyncio.gather(bell, change, return_exceptions=True)
