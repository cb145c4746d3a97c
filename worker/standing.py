"""A claim that stands at the server: it runs there the moment a job comes, and not a way there and
back later.

An idle worker's bell and the claim that would follow it are sent at once; the server keeps the
claim until the bell rings or its time is over. A ticket in Redis says that the claim is still
wanted. Whoever takes the ticket away first decides: the claim, which runs then, or the worker that
has thought better of it.

Invariant: a claim whose ticket was taken away takes nothing, whenever it runs.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenfleet.producer.connection import Connection, ResponseError
from tokenfleet.producer.errors import KeyOccupied
from tokenfleet.producer.keys import Keys
from tokenfleet.producer.kinds import WRONG_TYPE
from tokenfleet.producer.scripts import Script
from tokenfleet.worker.claims import ClaimedJob

SPARE_MS = 2000
"""A ticket outlives the wait by this."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What whoever waits has of it."""

    jobs: Callable[[], Awaitable[list[ClaimedJob]]]
    """Waits and claims, once; raises as a claim does."""
    withdraw: Callable[[], Awaitable[bool]]
    """See StandingClaim."""


class StandingClaim:
    """One such claim, in one partition.

    Args:
        line: name of the connection that it has to itself.
    """

    def __init__(self, connection: Connection, names: Keys, worker_id: str, line: str) -> None:
        self._connection = connection
        self._names = names
        self._key = names.standing(worker_id)
        self._line = line
        self.ticket = uuid.uuid4().hex

    async def run(
        self,
        lasts: Mapping[str, str],
        block_ms: int,
        script: Script,
        keys: list[str],
        args: list[Any],
    ) -> Any:
        """Wait for an entry behind `lasts`, up to `block_ms`, and run the claim; its reply.

        `args` hold the ticket. Raises as `Connection.run` does, NoScriptError included.
        """
        before = (
            # GET: what is no text there is somebody's, and stays
            ("SET", self._key, self.ticket, "PX", block_ms + SPARE_MS, "GET"),
            ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *lasts, *lasts.values()),
        )
        written, rung, reply = await self._connection.run_behind(
            before, script, self._names.partition, keys, args, line=self._line
        )
        if isinstance(written, Exception):
            foreign = KeyOccupied(self._key, "value", "string")
            raise foreign if _is_foreign(written) else written
        if isinstance(rung, Exception) and not _is_foreign(rung):  # of that the claim has told
            raise rung
        return reply

    async def withdraw(self) -> bool:
        """Take the ticket away. True: nothing is taken any more; False: the claim has run, or its
        reply tells that it found no ticket. Raises BrokerUnavailable."""
        return bool(await self._connection.execute("DEL", self._key))


def _is_foreign(error: Exception) -> bool:
    return isinstance(error, ResponseError) and WRONG_TYPE in str(error)
