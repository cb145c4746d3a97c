"""How jobs leave a worker unharmed, and how the next attempt goes on."""

from __future__ import annotations

import asyncio

import pytest

from tokenfleet.producer.protocol import Event
from tokenfleet.worker.claims import flat
from tokenfleet.worker.queue import Emission, EmitOutcome, JobQueue


async def crash(fleet) -> None:
    """The newest worker vanishes without a word, and the leases of its jobs run out."""
    fleet.runs[-1].cancel()
    await asyncio.gather(fleet.runs[-1], return_exceptions=True)
    await fleet.end_leases()


async def test_a_crashed_workers_job_goes_on_behind_its_logged_tokens(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit("p")
    await until(lambda: fleet.has(job))
    for piece in ("caf", "é i", "s"):
        fleet.engine.say(job, piece)
    await until(lambda: fleet.shows(job, "café is"))
    await crash(fleet)
    fleet.worker()
    await until(lambda: len(fleet.engines) == 2 and fleet.has(job))
    request = fleet.engine.requests[job]
    assert request.resume == (tuple("café is".encode()),)
    assert int(await fleet.field(job, "attempt")) == 2
    fleet.engine.say(job, " open", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    result = await fleet.result(job)
    assert (result.text, result.attempts) == ("café is open", 2)
    assert await fleet.text(job) == "café is open"
    assert [e.attempt for e in await fleet.log(job) if e.token_ids][-1] == 2


async def test_a_job_taken_from_its_engine_is_not_ended_by_the_engines_word(
    fleet, until, monkeypatch
) -> None:
    """The engine says "cancelled" of it while its last tokens are still on their way to the log."""
    worker = fleet.worker(grace_s=0)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "abc")
    await until(lambda: fleet.shows(job, "abc"))
    arrived, go_on, emit = asyncio.Event(), asyncio.Event(), JobQueue.emit

    async def slow_emit(queue: JobQueue, emissions: list[Emission]) -> EmitOutcome:
        arrived.set()
        await go_on.wait()
        return await emit(queue, emissions)

    monkeypatch.setattr(JobQueue, "emit", slow_emit)
    fleet.engine.say(job, "de")
    await arrived.wait()
    worker.drain()
    await until(lambda: fleet.engine.aborted and fleet.engine.heard_out)
    go_on.set()
    assert await fleet.runs[0] == 0
    assert await fleet.state(job) == "waiting"
    assert await fleet.text(job) == "abcde"


async def test_text_that_was_held_back_is_derived_again(fleet, until) -> None:
    first = fleet.worker(grace_s=0)
    job = await fleet.submit(sampling={"stop": ["<end>"], "max_tokens": 100})
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "abc")
    fleet.engine.say(job, "<en")  # may become the stop string
    key = fleet.connection.keys(0).job(job)
    await until(lambda: _equals(fleet.redis.hget(key, "offset"), b"6"))
    assert await fleet.text(job) == "abc"
    first.drain()
    await fleet.runs[0]
    fleet.worker()
    await until(lambda: len(fleet.engines) == 2 and fleet.has(job))
    fleet.engine.say(job, "ter>", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "abc<enter>"
    assert (await fleet.result(job)).text == "abc<enter>"


async def test_a_stop_string_across_two_attempts_ends_the_job(fleet, until) -> None:
    first = fleet.worker(grace_s=0)
    job = await fleet.submit(sampling={"stop": ["<end>"], "max_tokens": 100})
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "abc<en")
    await until(lambda: fleet.shows(job, "abc"))
    first.drain()
    await fleet.runs[0]
    fleet.worker()
    await until(lambda: len(fleet.engines) == 2 and fleet.has(job))
    fleet.engine.say(job, "d>xyz")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "abc"
    assert (await fleet.result(job)).finish_reason == "stop"


async def test_of_several_choices_only_those_that_had_not_ended_go_on(fleet, until) -> None:
    first = fleet.worker(grace_s=0)
    job = await fleet.submit(sampling={"n": 2, "max_tokens": 100})
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "done", "stop", choice=0)
    fleet.engine.say(job, "half", choice=1)
    key = fleet.connection.keys(0).job(job)
    await until(lambda: _equals(fleet.redis.hget(key, "offset"), b"8"))
    first.drain()
    await fleet.runs[0]
    fleet.worker()
    await until(lambda: len(fleet.engines) == 2 and fleet.has(job))
    request = fleet.engine.requests[job]
    assert request.resume == (tuple(b"done"), tuple(b"half"))
    assert request.ended == {0}
    fleet.engine.say(job, "way", "length", choice=1)
    await until(lambda: fleet.is_(job, "finished"))
    result = await fleet.result(job)
    assert [(c.text, c.finish_reason) for c in result.choices] == [
        ("done", "stop"),
        ("halfway", "length"),
    ]


async def test_a_job_whose_log_is_complete_ends_without_the_engine(fleet, until) -> None:
    other = fleet.queue("other")
    job = await fleet.submit()
    (claimed,) = await until(lambda: other.claim(1))
    events = (Event(offset=0, attempt=1, token_ids=(97,), text="a", finish_reason="stop"),)
    await other.emit([(job, 1, flat(events))])
    await other.release([claimed], "it dies between its last token and the end")
    fleet.worker()
    await until(lambda: fleet.is_(job, "finished"))
    assert fleet.engine.requests == {}
    result = await fleet.result(job)
    assert (result.text, result.finish_reason, result.attempts) == ("a", "stop", 2)


@pytest.mark.parametrize("calls", [1, 2])
async def test_drained_jobs_are_released_at_once_when_hurried(fleet, until, calls) -> None:
    worker = fleet.worker(grace_s=0 if calls == 1 else 3600)
    running, waiting = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(running, waiting))
    fleet.engine.say(running, "abc")
    for _ in range(calls):
        worker.drain()
    assert await fleet.runs[0] == 0
    assert await fleet.text(running) == "abc"
    for job in (running, waiting):
        assert await fleet.state(job) == "waiting"
        assert await fleet.field(job, "failures") == "0"
    assert await fleet.pending() == 0


async def test_a_draining_worker_finishes_what_runs_and_takes_nothing_new(fleet, until) -> None:
    worker = fleet.worker(max_num_seqs=1, prefetch=1, grace_s=3600)
    running, prefetched = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(running, prefetched))
    fleet.engine.say(running, "abc")
    worker.drain()
    later = await fleet.submit()
    await until(lambda: fleet.is_(prefetched, "waiting"))
    fleet.engine.say(running, "def", "stop")
    assert await fleet.runs[0] == 0
    assert await fleet.state(running) == "finished"
    assert await fleet.text(running) == "abcdef"
    assert await fleet.state(later) == "waiting"
    assert await fleet.field(later, "attempt") in ("", "0")


async def test_an_engines_death_hands_its_jobs_back_and_starts_another(fleet, until) -> None:
    fleet.worker(max_num_seqs=1, prefetch=1)
    running, prefetched = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(running, prefetched))
    first = fleet.engine
    first.say(running, "abc")
    await until(lambda: fleet.shows(running, "abc"))
    first.say(running, "def")
    first.die()
    await until(lambda: len(fleet.engines) == 2 and fleet.has(running, prefetched))
    assert await fleet.text(running) == "abcdef"
    assert await fleet.field(running, "failures") == "1"
    assert await fleet.field(prefetched, "failures") == "0"
    assert fleet.engine.requests[running].resume == (tuple(b"abcdef"),)
    for job in (running, prefetched):
        fleet.engine.say(job, "!", "stop")
        await until(lambda job=job: fleet.is_(job, "finished"))


async def test_of_jobs_that_may_have_killed_an_engine_one_runs_at_a_time(fleet, until) -> None:
    fleet.worker(max_num_seqs=3)
    jobs = [await fleet.submit() for _ in range(3)]
    await until(lambda: fleet.has(*jobs))
    fleet.engine.die()
    await until(lambda: len(fleet.engines) == 2)
    await until(lambda: fleet.redis_pending_is(3))
    fresh = await until(lambda: list(fleet.engine.requests))
    assert len(fresh) == 1
    fleet.engine.say(fresh[0], "x")  # it has made a token: cleared
    await until(lambda: len(fleet.engine.requests) == 2)


async def test_an_engine_that_dies_without_a_step_five_times_ends_the_worker(fleet, until) -> None:
    fleet.worker(max_failures=100)
    for life in range(1, 6):
        await until(lambda life=life: len(fleet.engines) == life)
        fleet.engine.die()
    assert await fleet.runs[0] == 1
    assert await fleet.pending() == 0


async def test_deaths_with_steps_between_them_do_not_add_up(fleet, until) -> None:
    worker = fleet.worker(max_failures=100)
    job = await fleet.submit()
    for life in range(1, 8):
        await until(lambda life=life: len(fleet.engines) == life and fleet.has(job))
        fleet.engine.say(job, "x")
        await until(lambda life=life: fleet.shows(job, "x" * life))
        fleet.engine.die()
    await until(lambda: len(fleet.engines) == 8 and fleet.has(job))
    fleet.engine.say(job, "!", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    await until(lambda: len(worker.roster) == 0)


async def test_a_job_that_kills_every_engine_is_given_up_and_others_are_not(fleet, until) -> None:
    fleet.worker(max_num_seqs=2, max_failures=1)
    bad, good = await fleet.submit("bad"), await fleet.submit("good")
    said = 0
    while await fleet.state(bad) != "failed":
        engine = fleet.engine if fleet.engines else None
        if engine and good in engine.requests and said < 50:
            said += 1
            engine.say(good, "x")
            await until(lambda text="x" * said: fleet.shows(good, text))
        if engine and bad in engine.requests:
            engine.die()
            await until(lambda engine=engine: fleet.engine is not engine)
        await asyncio.sleep(0.005)
    assert await fleet.field(bad, "error_code") == "engine_died"
    await until(lambda: fleet.has(good))
    fleet.engine.say(good, "!", "stop")
    await until(lambda: fleet.is_(good, "finished"))


async def _equals(reply, value: bytes) -> bool:
    return await reply == value
