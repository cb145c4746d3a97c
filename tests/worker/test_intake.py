"""When a worker asks Redis for jobs, and when it only listens."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

from tokenfleet.worker.broker import Broker
from tokenfleet.worker.intake import Intake
from tokenfleet.worker.preemption import Seats
from tokenfleet.worker.queue import ClaimedJob
from tokenfleet.worker.roster import Roster
from tokenfleet.worker.standing import Standing

TURNS = 20
"""Turns of the loop that anything would need that was going to happen."""


class EmptyQueue:
    """Counts what is asked of it; its bell rings when the test says so."""

    cut_short = False
    connection = SimpleNamespace(partitions=1)

    def __init__(self) -> None:
        self.claims = 0
        self.waits = 0
        self.rung = asyncio.Event()

    async def claim(self, count: int) -> list[ClaimedJob]:
        self.claims += 1
        return []

    def stand(self, count: int, timeout_s: float) -> Standing | None:
        return None

    async def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        await self.rung.wait()
        self.rung.clear()
        return True


class LongQueue(EmptyQueue):
    """Has jobs for the first claims, as many as they ask for."""

    def __init__(self, jobs: int) -> None:
        super().__init__()
        self.left = jobs
        self.asked: list[int] = []

    async def claim(self, count: int) -> list[Any]:
        self.asked.append(count)
        found = min(count, self.left)
        self.left -= found
        return [object()] * found


class StandingQueue(LongQueue):
    """Has its claims stand at the server; there they run, or not, as the test says."""

    def __init__(self, jobs: int = 0) -> None:
        super().__init__(jobs)
        self.stood: list[int] = []
        self.run = asyncio.Event()
        self.gone = True
        """Whether a withdrawal comes before the claim."""
        self.withdrawn = 0

    def stand(self, count: int, timeout_s: float) -> Standing:
        self.stood.append(count)
        return Standing(partial(self._jobs, count), self._withdraw)

    async def _jobs(self, count: int) -> list[Any]:
        await self.run.wait()
        self.run.clear()
        return await LongQueue.claim(self, count)

    async def _withdraw(self) -> bool:
        self.withdrawn += 1
        return self.gone


class Counting:
    """A dispatcher that owns what it is given."""

    launcher = SimpleNamespace(engine=object())

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.told: list[tuple[int, bool]] = []

    def take(self, claimed: list[Any], asked_at: float, *, more: bool) -> None:
        self.told.append((len(claimed), more))
        self.roster.slots -= len(claimed)


class Nobody:
    """A dispatcher with an engine and no jobs."""

    launcher = SimpleNamespace(engine=object())

    def take(self, claimed: list[ClaimedJob], asked_at: float, *, more: bool) -> None:
        assert claimed == []
        assert not more


class Claiming:
    """A worker of two slots that takes jobs."""

    def __init__(self, queue: Any = None, dispatcher: Any = None, slots: int = 2) -> None:
        self.queue, self.roster = queue or EmptyQueue(), Roster(slots, 0)
        self.dispatcher = dispatcher(self.roster) if dispatcher else Nobody()
        parts: Any = (self.queue, Broker(), self.roster, self.dispatcher, Seats(slots, 0))
        self.intake = Intake(*parts)
        self.run = asyncio.create_task(self.intake.run())

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def end(self) -> None:
        self.intake.drain()
        await self.run


async def test_jobs_that_begin_and_end_bring_no_claim_while_the_bell_is_silent() -> None:
    """The queues were empty: whatever is added to them rings."""
    worker = Claiming()
    await worker.settle()
    for _ in range(5):
        worker.roster.touch()
        await worker.settle()
    assert (worker.queue.claims, worker.queue.waits) == (1, 1)
    worker.queue.rung.set()
    await worker.settle()
    assert (worker.queue.claims, worker.queue.waits) == (2, 2)
    await worker.end()


async def test_an_engine_that_comes_back_is_given_work_without_a_bell() -> None:
    worker = Claiming()
    await worker.settle()
    launcher = worker.dispatcher.launcher
    launcher.engine, engine = None, launcher.engine
    worker.roster.touch()
    await worker.settle()
    assert worker.queue.claims == 1
    launcher.engine = engine
    worker.roster.touch()
    await worker.settle()
    assert worker.queue.claims == 2
    await worker.end()


async def test_of_a_burst_a_few_jobs_are_fetched_first_and_then_more_at_a_time() -> None:
    """The engine can begin with them; what follows is said, and that nothing does."""
    worker = Claiming(LongQueue(25), Counting, slots=64)
    await worker.settle()
    assert worker.queue.asked == [2, 4, 8, 16]
    assert worker.dispatcher.told == [(2, True), (4, True), (8, True), (11, False)]
    worker.queue.left = 3
    worker.queue.rung.set()
    await worker.settle()
    assert worker.queue.asked[4:] == [2, 4]
    await worker.end()


async def test_no_more_is_fetched_than_there_is_room_for() -> None:
    worker = Claiming(LongQueue(30), Counting, slots=6)
    await worker.settle()
    assert worker.queue.asked == [2, 4]
    assert worker.dispatcher.told == [(2, True), (4, False)]
    await worker.end()


async def test_an_idle_worker_lets_its_claim_stand_and_fetches_more_behind_what_that_brings() -> (
    None
):
    worker = Claiming(StandingQueue(), Counting, slots=64)
    await worker.settle()
    assert (worker.queue.asked, worker.queue.stood) == ([2], [2])
    worker.queue.left = 9
    worker.queue.run.set()
    await worker.settle()
    assert worker.dispatcher.told[1:] == [(2, True), (4, True), (3, False)]
    assert worker.queue.stood == [2, 2]
    await worker.end()


async def test_a_claim_that_stands_outlasts_changes_here_that_leave_nothing_to_do() -> None:
    worker = Claiming(StandingQueue(), Counting)
    await worker.settle()
    for _ in range(5):
        worker.roster.touch()
        await worker.settle()
    assert (worker.queue.stood, worker.queue.withdrawn) == ([2], 0)
    await worker.end()


async def test_a_worker_that_drains_withdraws_its_claim() -> None:
    worker = Claiming(StandingQueue(), Counting)
    await worker.settle()
    await worker.end()
    assert worker.queue.withdrawn == 1
    assert worker.dispatcher.told == [(0, False)] * 2


async def test_what_a_claim_took_before_it_could_be_withdrawn_is_owned() -> None:
    worker = Claiming(StandingQueue(), Counting)
    await worker.settle()
    worker.queue.gone, worker.queue.left = False, 1
    worker.intake.drain()
    await worker.settle()
    assert not worker.run.done()
    worker.queue.run.set()
    await worker.run
    assert worker.dispatcher.told[-1] == (1, False)


async def test_no_claim_stands_without_an_engine() -> None:
    worker = Claiming(StandingQueue(), Counting)
    launcher = worker.dispatcher.launcher
    await worker.settle()
    launcher.engine, engine = None, launcher.engine
    worker.roster.touch()
    await worker.settle()
    assert (worker.queue.withdrawn, worker.queue.stood) == (1, [2])
    launcher.engine = engine
    worker.roster.touch()
    await worker.settle()
    assert worker.queue.stood == [2, 2]
    await worker.end()
