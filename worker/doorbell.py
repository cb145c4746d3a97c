"""Wakes an idle worker when a job may be there, without claiming anything.

One blocking XREAD per partition waits for entries behind those that the last claim left. It stays
under the socket's timeout, and a call that is still waiting when the worker turns to other things
is kept for the next wait: to cancel it would cost its connection.

Invariant: an entry added after the last claim ends the next wait at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnavailable

BLOCK_MS = 2000


class Doorbell:
    """Waits on the queues of one model.

    Args:
        name: that no other one of this connection has.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._seen: dict[int, dict[str, str]] = {}
        self._calls: dict[int, asyncio.Task[Any]] = {}

    def seen(self, partition: int, lasts: dict[str, str]) -> None:
        """After a claim that emptied the queues: the last entry of each; "" for one that is not
        ours, which nobody can wait on."""
        self._seen[partition] = {key: last for key, last in lasts.items() if last}

    def lasts(self, partition: int) -> dict[str, str]:
        """The entries that are waited behind."""
        return self._seen.get(partition, {})

    async def wait(self, timeout_s: float) -> bool:
        """True when something may be there. Raises BrokerUnavailable."""
        for partition, lasts in self._seen.items():
            if lasts and partition not in self._calls:
                call = asyncio.create_task(self._call(partition), name="doorbell")
                self._calls[partition] = call
        if not self._calls:
            if self._seen:  # and none of it can be waited on
                await asyncio.sleep(timeout_s)
            return True
        done, _ = await asyncio.wait(
            self._calls.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        self._calls = {p: call for p, call in self._calls.items() if call not in done}
        errors = [call.exception() for call in done]  # of all: none must go unseen
        for error in errors:
            if error is not None:
                raise error
        return any(call.result() for call in done)

    async def aclose(self) -> None:
        """Stop waiting."""
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _call(self, partition: int) -> bool:
        lasts = self._seen[partition]
        command = ["XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", *lasts, *lasts.values()]
        try:
            line = f"{self._name} {partition}"
            return bool(await self._connection.once(*command, line=line))
        except BrokerUnavailable:
            await asyncio.sleep(0.05)
            raise
