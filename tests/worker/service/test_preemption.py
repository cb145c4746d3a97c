"""Batch jobs on a full worker make way for more urgent ones, and lose no token by it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.engine_link.engine_process import Batch, StepEvent
from tokenfleet.worker.engine_link.simulated import SimulatedCore
from tokenfleet.worker.rules import Rules
from tokenfleet.worker.taker import Taker


def stepped(base: type, model: Path) -> type:
    """An engine that computes a step when the test says so, and counts them."""

    class SteppedEngine(base):
        def __init__(self, slots: int, start: asyncio.Event | None = None) -> None:
            super().__init__(slots, start)
            config = EngineConfig(model=model, max_num_seqs=slots)
            self.core = SimulatedCore(config, 0.0, sleep=lambda _: None)
            self.begun: dict[str, int] = {}
            """At which step each sequence made its first token, by its id in the engine."""

        def add(self, request: EngineRequest) -> None:
            super().add(request)
            self.core.add(request)

        def abort(self, id: str, choice: int | None = None) -> None:
            self.aborted.append((id.rpartition("/")[0], choice))
            self.core.abort(id, choice)

        def step(self) -> None:
            events = self.core.step()
            for event in events:
                if event.token_ids:
                    self.begun.setdefault(event.id, self.core.stats.step)
            said = [StepEvent(e.id, e.choice, e.token_ids, e.finish_reason) for e in events]
            self.stepped = True
            self._said.put_nowait(Batch(said, [], StepStats(), []))

        def begun_at(self, job: str) -> int | None:
            """The step of the job's first token in its latest attempt."""
            return self.begun.get(self.requests[job].id) if job in self.requests else None

    return SteppedEngine


@pytest.fixture
def full(fleet, until, byte_model):
    """full(slots, prefetch, lengths): a worker that is full of batch jobs which all run."""

    async def fill(slots: int, prefetch: int, lengths: list[int], **settings: Any) -> list[str]:
        fleet.engine_kind = stepped(fleet.engine_kind, byte_model)
        jobs = [await batch(fleet, n, length) for n, length in enumerate(lengths)]
        fleet.worker(max_num_seqs=slots, prefetch=prefetch, **settings)
        there = jobs[: slots + prefetch]
        await until(lambda: fleet.has(*there))
        await step(fleet, until)
        return jobs

    return fill


async def batch(fleet, number: int, length: int, **fields: Any) -> str:
    sampling = {"max_tokens": length, "ignore_eos": True}
    return await fleet.submit(f"job {number} ", priority="batch", sampling=sampling, **fields)


async def urgent(fleet, until, length: int = 5, **fields: Any) -> str:
    """A more urgent job, which the engine has been given."""
    sampling = {"max_tokens": length, "ignore_eos": True}
    given = {"priority": "interactive", "sampling": sampling, **fields}
    job = await fleet.submit("now! ", **given)
    await until(lambda: fleet.has(job))
    return job


async def step(fleet, until, count: int = 1) -> None:
    """Steps, each heard by the worker before the next."""
    for _ in range(count):
        fleet.engine.step()
        await until(lambda: fleet.engine.heard_out)


async def run_out(fleet, until, jobs: list[str]) -> None:
    """Step until these jobs have ended."""
    for job in jobs:
        while await fleet.state(job) != "finished":
            await step(fleet, until)
            await asyncio.sleep(0.001)


def answer(prompt: str, length: int) -> str:
    return (prompt * length)[:length]


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_an_urgent_job_starts_on_a_full_worker_and_no_batch_job_loses_a_token(
    fleet, until, full, prefetch
) -> None:
    lengths = [40 + 5 * n for n in range(8)]
    jobs = await full(4, prefetch, lengths)
    await step(fleet, until, 10)
    asked_at = fleet.engine.core.stats.step
    job = await urgent(fleet, until)
    await until(lambda: fleet.engine.aborted)
    await step(fleet, until, 2)
    steps = fleet.engine.begun_at(job) - asked_at
    assert steps <= 2
    await run_out(fleet, until, [job, *jobs])
    for number, (one, length) in enumerate(zip(jobs, lengths)):
        assert await fleet.text(one) == answer(f"job {number} ", length)
    assert await fleet.text(job) == answer("now! ", 5)
    twice = fleet.engine.core.stats.decode_tokens_total - sum(lengths) - 5
    put_back = [await fleet.field(one, "preempted") or "0" for one in jobs]
    assert [n for n in put_back if n != "0"] == ["1"]
    assert twice <= 2
    print(
        f"first token {steps} step(s) after it was asked for, 4 slots full of batch jobs; "
        f"1 job put back, {sum(lengths)} batch tokens: none lost, {twice} computed twice"
    )


async def test_as_many_make_way_as_urgent_jobs_wait(fleet, until, full) -> None:
    jobs = await full(4, 0, [50] * 4)
    waiting = [await urgent(fleet, until) for _ in range(3)]
    await step(fleet, until, 2)
    assert all(fleet.engine.begun_at(job) for job in waiting)
    await run_out(fleet, until, [*waiting, *jobs])
    assert sorted([await fleet.field(job, "preempted") or "0" for job in jobs]) == list("0111")


async def test_the_one_with_the_least_to_compute_again_makes_way(fleet, until, full) -> None:
    jobs = await full(3, 0, [60, 4, 60])
    await step(fleet, until, 3)  # the second has ended
    late = await batch(fleet, 9, 60)
    await until(lambda: fleet.has(late))
    await step(fleet, until, 3)
    await urgent(fleet, until)
    await until(lambda: (late, None) in fleet.engine.aborted)
    assert not {(job, None) for job in (jobs[0], jobs[2])} & set(fleet.engine.aborted)


async def test_a_default_job_displaces_a_batch_job_and_is_displaced_by_none(
    fleet, until, full
) -> None:
    (low,) = await full(1, 0, [60])
    middle = await urgent(fleet, until, 30, priority="default")
    await until(lambda: (low, None) in fleet.engine.aborted)
    await step(fleet, until)
    high = await fleet.submit("now! ", priority="interactive", sampling={"max_tokens": 3})
    await step(fleet, until, 10)
    assert await fleet.state(high) == "waiting"
    await run_out(fleet, until, [middle, high, low])
    assert await fleet.text(low) == answer("job 0 ", 60)


async def test_no_job_makes_way_for_its_own_class(fleet, until, full) -> None:
    jobs = await full(2, 0, [20, 20])
    other = await batch(fleet, 9, 20)
    await step(fleet, until, 10)
    assert await fleet.state(other) == "waiting"
    assert fleet.engine.aborted == []
    await run_out(fleet, until, [*jobs, other])


async def test_a_job_is_put_back_so_often_and_then_runs_to_its_end(fleet, until, full) -> None:
    (job,) = await full(1, 0, [40], max_preemptions=2)
    for number in (1, 2):
        first = await urgent(fleet, until, 2)
        await until(lambda number=number: _counts(fleet, job, number))
        await run_out(fleet, until, [first])
        await until(lambda n=number: fleet.engine.requests[job].id == f"{job}/{n + 1}")
        await step(fleet, until)
    last = await fleet.submit("now! ", priority="interactive", sampling={"max_tokens": 3})
    await step(fleet, until, 5)
    assert await fleet.state(last) == "waiting"
    await run_out(fleet, until, [job, last])
    assert await fleet.text(job) == answer("job 0 ", 40)
    assert await fleet.field(job, "failures") == "0"


async def test_with_no_preemptions_allowed_an_urgent_job_waits_for_a_free_slot(
    fleet, until, full
) -> None:
    (job,) = await full(1, 0, [10], max_preemptions=0)
    other = await fleet.submit("now! ", priority="interactive", sampling={"max_tokens": 3})
    await step(fleet, until, 5)
    assert await fleet.state(other) == "waiting"
    await run_out(fleet, until, [job, other])


async def test_a_prefetched_urgent_job_does_not_wait_behind_running_batch_jobs(
    fleet, until, full
) -> None:
    jobs = await full(2, 2, [60, 60])  # two places of the prefetch are free: it is simply claimed
    await step(fleet, until, 3)
    job = await urgent(fleet, until)
    await until(lambda: fleet.engine.aborted)
    await step(fleet, until, 2)
    assert fleet.engine.begun_at(job)
    await run_out(fleet, until, [job, *jobs])


async def test_a_job_of_several_choices_gets_as_many_slots(fleet, until, full) -> None:
    jobs = await full(4, 2, [60] * 4)
    await step(fleet, until, 2)
    job = await urgent(fleet, until, sampling={"max_tokens": 5, "n": 3, "ignore_eos": True})
    await until(lambda: len(fleet.engine.aborted) == 3)
    await step(fleet, until, 1)
    await run_out(fleet, until, [job, *jobs])


async def test_no_more_than_slots_and_prefetch_are_owned_while_jobs_make_way(
    fleet, until, full
) -> None:
    await full(2, 1, [200] * 5, worker_id="w")
    for _ in range(4):
        await urgent(fleet, until, 3)
        assert await fleet.pending("w") <= 3
        await step(fleet, until, 2)
        assert await fleet.pending("w") <= 3


async def test_a_paused_urgent_queue_displaces_nobody(fleet, until, full) -> None:
    (job,) = await full(1, 0, [30])
    await Rules(fleet.connection).pause("m", ["interactive"])
    other = await fleet.submit("now! ", priority="interactive", sampling={"max_tokens": 3})
    await step(fleet, until, 10)
    assert fleet.engine.aborted == []
    await Rules(fleet.connection).resume("m")
    await until(lambda: fleet.has(other))
    await run_out(fleet, until, [job, other])


async def test_two_full_workers_put_back_one_job_for_one_urgent_job(fleet, until, full) -> None:
    await full(1, 0, [300])
    await batch(fleet, 1, 300)
    fleet.worker(max_num_seqs=1, prefetch=0)
    await until(lambda: len(fleet.engines) == 2 and fleet.engine.requests)
    for engine in fleet.engines:
        engine.step()
    job = await fleet.submit("now! ", priority="interactive", sampling={"max_tokens": 3})
    await until(lambda: any(job in engine.requests for engine in fleet.engines))
    await until(lambda: any(engine.aborted for engine in fleet.engines))
    (host,) = [engine for engine in fleet.engines if job in engine.requests]
    (other,) = [engine for engine in fleet.engines if job not in engine.requests]
    assert len(host.aborted) == 1
    assert other.aborted == []


async def _counts(fleet, job: str, number: int) -> bool:
    return await fleet.field(job, "preempted") == str(number)


@pytest.mark.parametrize("meanwhile", ["ends", "is lost"])
async def test_a_job_that_loses_its_place_may_end_or_be_lost_meanwhile(
    fleet, until, monkeypatch, meanwhile
) -> None:
    """Its last token comes while Redis gives its place away: the next attempt makes it again."""
    worker = fleet.worker(max_num_seqs=1)
    job = await batch(fleet, 0, 100)
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "abc")
    await until(lambda: fleet.shows(job, "abc"))
    swapped, go_on, swap = asyncio.Event(), asyncio.Event(), Taker.swap_in

    async def slow_swap(taker: Taker, partition: int, victims: Any) -> Any:
        found = await swap(taker, partition, victims)
        if found[0]:
            swapped.set()
            await go_on.wait()
        return found

    monkeypatch.setattr(Taker, "swap_in", slow_swap)
    soon = await fleet.submit("now!", priority="interactive")
    await swapped.wait()
    if meanwhile == "ends":
        fleet.engine.say(job, "d", "stop")
        await until(lambda: fleet.engine.heard_out)
    else:
        worker.roster.remove(worker.roster.get(job))
    go_on.set()
    await until(lambda: fleet.has(soon))
    assert await fleet.is_(job, "waiting")
    fleet.engine.say(soon, "!", "stop")
    await until(lambda: fleet.is_(soon, "finished"))
    await until(lambda: fleet.engine.requests[job].id.endswith("/2"))
    fleet.engine.say(job, "d", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "abcd"
