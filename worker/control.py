"""What others tell this worker while it runs: cancel a job, drain.

The channel is a short cut and carries no promise: what is lost here is found at the next emit,
renewal or lease. So a broken subscription is made again without any catching up. On a cluster there
is one channel a partition, each on the server that the partition lives on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnsupported
from tokenfleet.producer.hub import Hub
from tokenfleet.producer.subscription import Subscription
from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.dispatch import Dispatcher
from tokenfleet.worker.roster import Roster

SILENCE_S = 3600.0

REFUSED_S = 30.0
"""A worker that may not listen serves all the same, and asks again this much later."""

log = structlog.get_logger()


class Control:
    """Listens on this worker's control channels.

    Args:
        drain: called when somebody asks this worker to take no more jobs and to end.
    """

    def __init__(
        self,
        connection: Connection,
        broker: Broker,
        roster: Roster,
        dispatcher: Dispatcher,
        *,
        worker_id: str,
        drain: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._broker = broker
        self._roster = roster
        self._dispatcher = dispatcher
        self._worker_id = worker_id
        self._drain = drain

    async def run(self) -> None:
        """Listen until cancelled."""
        hub = Hub(self._connection)
        try:
            async with asyncio.TaskGroup() as group:
                for partition in range(self._connection.partitions):
                    group.create_task(self._listen(hub, partition), name="control")
        finally:
            await hub.aclose()

    async def _listen(self, hub: Hub, partition: int) -> None:
        ear = await self._subscribe(hub, partition)
        while True:
            message = await ear.get(SILENCE_S)
            if isinstance(message, bytes):
                self.heard(message)

    async def _subscribe(self, hub: Hub, partition: int) -> Subscription:
        """Subscribed once; from then on the hub keeps it up."""
        channel = self._connection.keys(partition).control(self._worker_id)
        while True:
            try:
                return await hub.subscribe(partition, channel)
            except BROKER_ERRORS as error:
                self._broker.away("control channel", error)
                if isinstance(error, BrokerUnsupported):
                    await asyncio.sleep(REFUSED_S)
            await self._broker.pause()

    def heard(self, data: bytes) -> None:
        """Act on one message; one that makes no sense is logged and forgotten."""
        words = data.decode(errors="replace").split()
        if words == ["drain"]:
            log.info("drain_requested")
            self._drain()
        elif len(words) == 3 and words[0] == "cancel" and words[2].isdecimal():
            job = self._roster.get(words[1])
            if job is not None and job.claimed.attempt == int(words[2]):
                self._dispatcher.cancel(job)
        else:
            log.warning("control_message_ignored", size=len(data))
