"""What waits in Redis, looked at now and then so that a dashboard can show it.

Every worker says the same of its model's queue: whoever adds the workers up counts jobs twice.
A figure that could not be read is not shown; an old one never stands for it.
"""

from __future__ import annotations

import asyncio
import random

from tokenfleet.producer.connection import Connection
from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.observing.telemetry import Telemetry
from tokenfleet.worker.queue import JobQueue
from tokenfleet.worker.rules import Rules

INTERVAL_S = 10.0


class QueueWatch:
    """Tells telemetry how many jobs wait, what is paused, and how many dead letters there are."""

    def __init__(
        self,
        queue: JobQueue,
        connection: Connection,
        broker: Broker,
        telemetry: Telemetry,
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._queue = queue
        self._connection = connection
        self._rules = Rules(connection)
        self._broker = broker
        self._telemetry = telemetry
        self._interval_s = interval_s

    async def run(self) -> None:
        """Look until cancelled; jitter keeps the workers of a fleet apart."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s * random.uniform(0.5, 1.0))

    async def look(self) -> None:
        """Look once."""
        try:
            waiting = await self._queue.backlog()
            paused, dead = await self._paused(), await self._dead_letters()
        except BROKER_ERRORS as error:
            self._telemetry.queue_unseen()
            self._broker.away("queue watch", error)
            return
        self._broker.reached()
        self._telemetry.queue_seen(waiting, paused, dead)

    async def _paused(self) -> list[str]:
        """Classes of the model that nobody claims from."""
        model = self._queue.model_name
        return [priority for name, priority in await self._rules.paused() if name == model]

    async def _dead_letters(self) -> int:
        keys = (self._connection.keys(p).dead for p in range(self._connection.partitions))
        return sum([int(await self._connection.execute("ZCARD", key)) for key in keys])
