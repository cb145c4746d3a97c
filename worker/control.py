"""What others tell this worker while it runs: cancel a job, drain.

The channel is a short cut and carries no promise: what is lost here is found at the next emit,
renewal or lease. So a broken subscription is made again without any catching up.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from tokenfleet.producer.connection import Connection
from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.dispatch import Dispatcher
from tokenfleet.worker.roster import Roster

POLL_S = 1.0

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
        """Listen until cancelled. On a cluster there is no such channel: emit's replies do."""
        while not self._connection.cluster:
            try:
                await self._listen()
            except BROKER_ERRORS as error:
                self._broker.away("control channel", error)
            await self._broker.pause()

    async def _listen(self) -> None:
        channels = [
            self._connection.keys(partition).control(self._worker_id)
            for partition in range(self._connection.partitions)
        ]
        async with self._connection.client.pubsub() as pubsub:
            await pubsub.subscribe(*channels)
            while True:
                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=POLL_S)
                if message is not None:
                    self.heard(message["data"])

    def heard(self, data: bytes) -> None:
        """Act on one message; one that makes no sense is logged and forgotten."""
        words = data.decode(errors="replace").split()
        if words == ["drain"]:
            log.info("drain_requested")
            self._drain()
        elif len(words) == 3 and words[0] == "cancel" and words[2].isdigit():
            job = self._roster.get(words[1])
            if job is not None and job.claimed.attempt == int(words[2]):
                self._dispatcher.cancel(job)
        else:
            log.warning("control_message_ignored", size=len(data))
