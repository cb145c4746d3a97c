"""When the jobs of dead workers move on: within a lease and a scan, whoever holds what."""

from __future__ import annotations

import pytest

from tokenfleet.worker import reaper
from tokenfleet.worker.broker import Broker
from tokenfleet.worker.reaper import SCAN_LIMIT, Reaper

LEASE_S = 12.0


class Enough(Exception):
    """The test has seen what it waits for."""


async def test_a_scan_comes_at_least_every_half_lease(monkeypatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 200:
            raise Enough

    class Nothing:
        async def reclaim(self, limit: int) -> int:
            return 0

    monkeypatch.setattr(reaper.asyncio, "sleep", sleep)
    with pytest.raises(Enough):
        await Reaper(Nothing(), Broker(), lease_s=LEASE_S).run()
    assert max(pauses) <= LEASE_S / 2
    assert len(set(pauses)) > 100, "reapers that started together keep apart"


async def test_one_scan_moves_on_all_that_the_dead_held_and_leaves_the_living_theirs(
    valkey_lab,
) -> None:
    """No matter how many died, and in what order: nobody waits for a second scan."""
    lab = valkey_lab
    count = 2 * SCAN_LIMIT + 50
    ids = {await lab.submit() for _ in range(count)}
    dead = [await lab.queue(f"dead{number}") for number in range(5)]
    living = await lab.queue("living")
    held = [job for queue in dead for job in await queue.claim(count // 5 - 2)]
    kept = await living.claim(count)
    for job in held:
        await lab.expire_lease(job)
    moved = await Reaper(living, Broker(), lease_s=LEASE_S).scan()
    assert moved == len(held)
    again = await living.claim(count)
    assert {job.id for job in again} == {job.id for job in held} == ids - {job.id for job in kept}
    assert {job.attempt for job in again} == {2}
