"""Emptying a worker that takes no more jobs: finish what can be in time, hand back the rest.

Jobs leave in the order of what they lose by it: first those that have not begun, then, when the
grace time is over or somebody is in a hurry, those that run. Nobody loses a logged token.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from tokenfleet.worker.dispatch import Dispatcher
from tokenfleet.worker.jobs import Job, Stage
from tokenfleet.worker.roster import Roster

log = structlog.get_logger()


class Drain:
    """Empties one roster, once."""

    def __init__(self, roster: Roster, dispatcher: Dispatcher) -> None:
        self._roster = roster
        self._dispatcher = dispatcher

    async def run(self, *, grace_s: float, patience_s: float, hurry: asyncio.Event) -> None:
        """Return when no job is left, or Redis has not taken the last ends within the patience.

        Args:
            grace_s: how long running jobs may go on.
            patience_s: how long Redis is waited for afterwards.
            hurry: set, the grace time is over.
        """
        log.info("draining", jobs=len(self._roster), grace_s=grace_s)
        unbegun = [job for job in self._roster if job.stage in (Stage.CLAIMED, Stage.READY)]
        await self._hand_back([*unbegun, *self._dispatcher.waiting_in_engine()])
        if grace_s:
            await self._finish(grace_s, hurry)
        await self._hand_back(list(self._roster))
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._until_empty()

    async def _finish(self, grace_s: float, hurry: asyncio.Event) -> None:
        hurried = asyncio.ensure_future(hurry.wait())
        empty = asyncio.ensure_future(self._until_empty())
        await asyncio.wait((hurried, empty), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        empty.cancel()

    async def _hand_back(self, jobs: list[Job]) -> None:
        if jobs:
            await self._dispatcher.hand_back(jobs, "drain")

    async def _until_empty(self) -> None:
        while len(self._roster):
            await self._roster.change()
