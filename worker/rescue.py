"""Jobs whose worker is gone, or whose place in the queue is: found in one partition, and moved on.

Invariant: many may do this at the same time; each job is moved once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.scripts import Script, load
from tokenfleet.worker.claims import Terms, text
from tokenfleet.worker.job_log import PATIENCE_S

RECLAIM, PHANTOMS, REPAIR = (
    load("tokenfleet.worker.lua", name) for name in ("reclaim", "phantoms", "repair")
)


class Rescue:
    """Looks after the queues of one model, for one worker. JobQueue has the contracts."""

    def __init__(self, connection: Connection, terms: Terms) -> None:
        self._connection = connection
        self._terms = terms
        self._rank: Counter[int] = Counter()

    async def reclaim(self, partition: int, limit: int) -> int:
        args = [self._terms.lease_ms, limit, self._terms.max_failures, *self._terms.ttls]
        moved = await self._run(RECLAIM, partition, self._streams(partition), args)
        while await self.repair(partition, limit):
            pass  # a lost stream is filled again at once, however long it was
        return int(moved)

    async def repair(self, partition: int, count: int) -> int:
        keys = [self._connection.keys(partition).live(self._terms.model_name)]
        args = [self._rank[partition], count]
        self._rank[partition], put_back = await self._run(REPAIR, partition, keys, args)
        return int(put_back)

    def restart_repair(self, partition: int) -> None:
        """Groups were gone there: look at all live jobs again, from the first."""
        self._rank[partition] = 0

    async def release_phantoms(self, partition: int, known_ids: Collection[str]) -> set[str]:
        args = [self._terms.worker_id, *self._terms.ttls, *known_ids]
        ids = await self._run(PHANTOMS, partition, self._streams(partition), args)
        return {text(job_id) for job_id in ids}

    def _streams(self, partition: int) -> list[str]:
        return self._connection.keys(partition).streams(self._terms.model_name)

    async def _run(self, script: Script, partition: int, keys: list[str], args: list[Any]) -> Any:
        return await self._connection.run(script, partition, keys, args, patience_s=PATIENCE_S)
