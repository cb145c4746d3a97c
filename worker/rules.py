"""What holds for a whole fleet and stands in Redis: limits of tenants, queues that are paused.

Every client and worker obeys them from its next call on: the scripts look them up and decide.

Invariant: limits that are set hold for the jobs that were there before as well, once `set_limits`
has returned.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import InvalidJob
from tokenfleet.producer.fleet import reaching
from tokenfleet.producer.keys import PRIORITIES, check_model, check_name
from tokenfleet.producer.scripts import load
from tokenfleet.worker.claims import text
from tokenfleet.worker.rescue import REPAIR

EVERY_OTHER = "*"
"""Stands for all tenants that have no limits of their own."""

LIMIT = load("tokenfleet.worker.lua", "limit")

_SLICE = 200


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """How many jobs a tenant may have at once, of all models and classes; None: any number."""

    tenant: str
    running: int | None = None
    waiting: int | None = None
    """Delayed jobs and those between two tries count as waiting."""


class Rules:
    """The rules of one namespace. Raises what the client raises when Redis is away.

    Args:
        partitions: those of the fleet; a limit is shared out among them, at least 1 to each.
    """

    def __init__(self, connection: Connection, partitions: Sequence[int] | None = None) -> None:
        self._connection = connection
        self._partitions = sorted(partitions or range(connection.partitions))

    async def limits(self) -> list[TenantLimits]:
        """All that are set, by tenant; those for every other tenant first."""
        found: dict[str, list[str]] = {}
        for partition in self._partitions:
            reply = await self._connection.execute("HGETALL", self._keys(partition).limits)
            for tenant, limits in _pairs(reply):
                found.setdefault(tenant, []).append(limits)
        return [TenantLimits(tenant, *_total(shares)) for tenant, shares in sorted(found.items())]

    async def set_limits(self, wanted: TenantLimits) -> None:
        """Limit a tenant, or every other one. Raises InvalidJob for what is no name or number."""
        tenant = _checked(wanted)
        for place, partition in enumerate(self._partitions):
            shares = [self._share(most, place) for most in (wanted.running, wanted.waiting)]
            await self._limit(partition, tenant, "set", " ".join(shares))
            await self._settle_others(partition, tenant)
            async for model in self._models(partition):
                await self._count_jobs(partition, model)

    async def remove_limits(self, tenant: str) -> None:
        """Take a tenant's limits away; those for every other tenant hold for it then."""
        _checked(TenantLimits(tenant))
        for partition in self._partitions:
            await self._limit(partition, tenant, "remove")
            await self._settle_others(partition, tenant)

    async def pause(self, model: str, priorities: Iterable[str] = PRIORITIES) -> None:
        """Let nobody claim from these queues; what runs goes on, what is submitted waits.

        Raises InvalidJob for what can be no model's name.
        """
        check_model(model)
        classes = [f"{model}:{priority}" for priority in priorities]
        for partition in self._partitions:
            await self._connection.execute("SADD", self._keys(partition).paused, *classes)

    async def resume(self, model: str, priorities: Iterable[str] = PRIORITIES) -> None:
        """Let them be claimed from again, and wake the workers."""
        classes = [f"{model}:{priority}" for priority in priorities]
        for partition in self._partitions:
            keys = self._keys(partition)
            await self._connection.execute("SREM", keys.paused, *classes)
            await self._connection.execute("XADD", keys.bell(model), "MAXLEN", 1, "*", "r", 1)

    async def paused(self) -> set[tuple[str, str]]:
        """The paused queues, as model and priority."""
        found: set[tuple[str, str]] = set()
        for partition in self._partitions:
            for name in await self._connection.execute("SMEMBERS", self._keys(partition).paused):
                model, _, priority = text(name).rpartition(":")
                found.add((model, priority))
        return found

    def _share(self, most: int | None, place: int) -> str:
        """The part of a limit that one partition enforces."""
        if most is None:
            return ""
        whole, rest = divmod(most, len(self._partitions))
        return str(max(whole + (place < rest), min(most, 1)))

    async def _limit(self, partition: int, tenant: str, what: str, limits: str = "") -> None:
        await self._run(LIMIT, partition, [self._keys(partition).limits], [tenant, what, limits])

    async def _settle_others(self, partition: int, tenant: str) -> None:
        """The limits for every other tenant have changed: let each go on as it may now."""
        if tenant != EVERY_OTHER:
            return
        begin = self._keys(partition).tenant("", "").removesuffix(":")
        tenants = {key.removeprefix(begin).partition(":")[0] async for key in self._scan(begin)}
        for one in tenants:
            await self._limit(partition, one, "settle")

    async def _count_jobs(self, partition: int, model: str) -> None:
        rank, keys = 0, [self._keys(partition).live(model)]
        while True:
            rank, _ = await self._run(REPAIR, partition, keys, [rank, _SLICE])
            if rank == 0:
                return

    async def _models(self, partition: int) -> AsyncIterator[str]:
        """Models that have jobs there."""
        begin = self._keys(partition).live("")
        async for key in self._scan(begin):
            yield key.removeprefix(begin)

    async def _scan(self, begin: str) -> AsyncIterator[str]:
        with reaching(self._connection):
            async for key in self._connection.client.scan_iter(match=f"{begin}*", count=500):
                yield text(key)

    def _keys(self, partition: int) -> Any:
        return self._connection.keys(partition)

    async def _run(self, script: Any, partition: int, keys: list[str], args: list[Any]) -> Any:
        patience_s = self._connection.connect_timeout_s
        return await self._connection.run(script, partition, keys, args, patience_s=patience_s)


def _checked(limits: TenantLimits) -> str:
    for name in ("running", "waiting"):
        most = getattr(limits, name)
        if most is not None and (not isinstance(most, int) or most < 0):
            raise InvalidJob(name, most, "must be a number of jobs, 0 or more, or None")
    return limits.tenant if limits.tenant == EVERY_OTHER else check_name("tenant", limits.tenant)


def _total(shares: Iterable[str]) -> tuple[int | None, int | None]:
    """Most running and waiting over all partitions."""
    columns = zip(*(share.split(" ") for share in shares))
    running, waiting = (None if "" in column else sum(map(int, column)) for column in columns)
    return running, waiting


def _pairs(reply: Any) -> Iterable[tuple[str, str]]:
    """A map reply, flat or not, as text."""
    items = reply.items() if hasattr(reply, "items") else zip(reply[::2], reply[1::2])
    return [(text(name), text(value)) for name, value in items]
