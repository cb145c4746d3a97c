"""Moves jobs on whose worker has vanished, in every worker, so that no worker is special.

A scan comes at least every half lease. Many reapers may meet at one job: the script moves it once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import structlog

from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.queue import JobQueue

SCAN_LIMIT = 100
"""Jobs moved in one call; a longer list is scanned again at once."""

log = structlog.get_logger()


class Reaper:
    """Scans for expired leases until cancelled.

    Args:
        reclaimed: told how many jobs a scan moved on, when it did.
    """

    def __init__(
        self,
        queue: JobQueue,
        broker: Broker,
        *,
        lease_s: float,
        reclaimed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._queue = queue
        self._reclaimed = reclaimed
        self._broker = broker
        self._lease_s = lease_s

    async def run(self) -> None:
        """Scan for ever; jitter keeps reapers of one fleet apart."""
        while True:
            await asyncio.sleep(self._lease_s / 2 * random.uniform(0.5, 1.0))
            await self.scan()

    async def scan(self) -> int:
        """Move on what has expired; returns how many jobs."""
        moved = 0
        try:
            while (count := await self._queue.reclaim(SCAN_LIMIT)) >= SCAN_LIMIT:
                moved += count
            moved += count
        except BROKER_ERRORS as error:
            self._broker.away("reclaim", error)
            return moved
        self._broker.reached()
        if moved:
            self._reclaimed(moved)
            log.info("jobs_reclaimed", jobs=moved)
        return moved
