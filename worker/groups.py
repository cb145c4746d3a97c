"""Consumer groups, their backlog, and the worker table: what is known of the fleet as a whole.

Invariant: nothing here touches a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from redis.exceptions import ResponseError

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnsupported, KeyOccupied
from tokenfleet.producer.keys import GROUP
from tokenfleet.producer.scripts import load
from tokenfleet.worker.claims import text, together
from tokenfleet.worker.incarnation import Incarnation, WorkerIdTaken
from tokenfleet.worker.partitions import Silences, look

HEARTBEAT = load("tokenfleet.worker.lua", "heartbeat")


class Groups:
    """The group `workers` on the queues of one worker, and the worker's line in the table."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._silences = Silences()

    async def ensure(self, streams: Iterable[str]) -> list[str]:
        """Make streams and groups that are not there. A group starts at the first entry.

        Returns what is wrong with streams that are not ours, as sentences: the others are made.
        """
        found = await together([self._ensure(stream) for stream in streams])
        return [problem for problem in found if problem]

    async def _ensure(self, stream: str) -> str:
        try:
            await self._connection.execute("XGROUP CREATE", stream, GROUP, "0", "MKSTREAM")
        except KeyOccupied as error:
            return str(error)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        return ""

    async def policy_warnings(self) -> list[str]:
        """What is dangerous in the server's settings, as sentences; empty where one may not ask."""
        try:
            found = await self._connection.ask_server("CONFIG GET", "maxmemory-policy")
        except (ResponseError, BrokerUnsupported):
            return []
        policy = {text(name): text(value) for name, value in dict(found).items()}
        name = policy.get("maxmemory-policy", "noeviction")
        if name == "noeviction":
            return []
        return [f"maxmemory-policy is {name}: Redis may drop jobs; set it to noeviction"]

    async def waiting(self, streams: Iterable[str]) -> int:
        """Entries that nobody holds.

        From lengths and pending entries: the group's own lag is wrong after a delete.
        """
        return sum(await together([self._waiting(stream) for stream in streams]))

    async def _waiting(self, stream: str) -> int:
        try:
            length = int(await self._connection.execute("XLEN", stream))
        except KeyOccupied:  # no job waits in what is not ours; whoever claims says so
            return 0
        return max(0, length - sum((await self._held(stream)).values()))

    async def leave(self, streams: Iterable[str], worker_id: str) -> None:
        """Take the worker's name off the groups in which it holds nothing."""
        await together([self._leave(stream, worker_id) for stream in streams])

    async def _leave(self, stream: str, worker_id: str) -> None:
        if (await self._held(stream)).get(worker_id, 0) == 0:
            with suppress(
                ResponseError, KeyOccupied
            ):  # the group or its stream is gone, and the name with it
                await self._connection.execute("XGROUP DELCONSUMER", stream, GROUP, worker_id)

    async def heartbeat(
        self, worker_id: str, line: Mapping[str, str | int | float], *, ttl_ms: int
    ) -> int:
        """Write the worker's line for `ttl_ms`; 0 takes it away. Returns the server's ms.

        Raises WorkerIdTaken where the line is another incarnation's. Parts of a cluster that are
        away or silent have no line, and are asked again; raises where all are.
        """
        values = [part for pair in line.items() for part in pair]

        async def beat(partition: int) -> int:
            names = self._connection.keys(partition)
            keys = [names.workers, names.worker(worker_id)]
            args = [worker_id, ttl_ms, *values]
            reply = await self._connection.run(HEARTBEAT, partition, keys, args, patience_s=0.5)
            if isinstance(reply, list):
                key, seen, host, pid, pids = reply
                other = Incarnation(text(key), text(host), pid, text(pids))
                raise WorkerIdTaken(worker_id, other, seen)
            return int(reply)

        asked = self._silences.asked(range(self._connection.partitions))
        found, unseen = await look(beat, asked, self._silences)
        if not found:
            raise next(iter(unseen.values()))
        return max(found.values())

    async def _held(self, stream: str) -> dict[str, int]:
        """Entries held in the group, by worker."""
        try:
            summary = await self._connection.execute("XPENDING", stream, GROUP)
        except (ResponseError, KeyOccupied):
            return {}  # the group or its stream is gone; the next claim makes it again
        return {text(one["name"]): int(one["pending"]) for one in summary["consumers"] or ()}
