"""A Redis that goes away, comes back, forgets its scripts, or loses its end of the log."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.worker.queue import JobQueue


async def in_thread(call, *args):
    return await asyncio.to_thread(call, *args)


async def test_what_is_made_while_redis_is_away_arrives_when_it_is_back(own_fleet, until) -> None:
    fleet = own_fleet
    worker = fleet.worker(lease_s=60)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "before ")
    await until(lambda: fleet.shows(job, "before "))
    await in_thread(fleet.server.stop)
    fleet.engine.say(job, "mean")
    fleet.engine.say(job, "while ")
    await until(lambda: "Redis is not reachable" in worker.not_ready())
    fleet.engine.say(job, "after", "stop")
    await in_thread(fleet.server.start)
    await fleet.redis.connection_pool.disconnect()
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "before meanwhile after"
    assert (await fleet.result(job)).attempts == 1
    await until(lambda: worker.not_ready() == [])
    other = await fleet.submit()
    await until(lambda: fleet.has(other))


async def test_an_idle_worker_is_not_ready_without_redis_and_takes_jobs_when_it_is_back(
    own_fleet, until
) -> None:
    """How soon: after its next try, which is never further off than the longest pause
    (test_broker.py)."""
    fleet = own_fleet
    worker = fleet.worker()
    await until(lambda: fleet.engines and worker.not_ready() == [])
    await in_thread(fleet.server.stop)
    await until(lambda: "Redis is not reachable" in worker.not_ready())
    await in_thread(fleet.server.start)
    await fleet.redis.connection_pool.disconnect()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "as ever", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    await until(lambda: worker.not_ready() == [])


async def test_when_the_leases_have_run_out_the_engine_stops_too(
    own_fleet, until, often_renewed, monkeypatch
) -> None:
    fleet = own_fleet
    worker = fleet.worker(lease_s=30)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "abc")
    await until(lambda: fleet.shows(job, "abc"))
    await in_thread(fleet.server.stop)
    with monkeypatch.context() as an_hour_later:
        an_hour_later.setattr(worker.parts.leases, "_clock", lambda: time.monotonic() + 3600)
        await until(lambda: (job, None) in fleet.engine.aborted)
        await until(lambda: len(worker.roster) == 0)
    await in_thread(fleet.server.start)
    await fleet.redis.connection_pool.disconnect()
    await fleet.end_leases()
    await until(lambda: _runs_anew(fleet, job))
    assert fleet.engine.requests[job].resume == (tuple(b"abc"),)
    fleet.engine.say(job, "def", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "abcdef"


async def _runs_anew(fleet, job) -> bool:
    """Whether the engine has the attempt that Redis knows: the second, or a third where the worker
    had found the job in its name again before its lease was ended."""
    found = await fleet.redis.hmget(fleet.connection.keys(0).job(job), "state", "attempt")
    attempt = int(found[1])
    return (
        found[0] == b"running" and fleet.engine.requests[job].id == f"{job}/{attempt}" != f"{job}/1"
    )


@pytest.mark.parametrize("call", ["emit", "finish"])
async def test_a_lost_reply_neither_doubles_nor_drops_a_token(
    fleet, until, monkeypatch, call
) -> None:
    real = getattr(JobQueue, call)
    lost = []

    async def lossy(self, *args, **kwargs):
        reply = await real(self, *args, **kwargs)
        if len(lost) < 3:
            lost.append(args)
            raise BrokerUnavailable("the reply was lost")
        return reply

    monkeypatch.setattr(JobQueue, call, lossy)
    worker = fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    for index, piece in enumerate(("a", "bc", "d"), 1):
        fleet.engine.say(job, piece)
        if call == "emit":
            await until(lambda index=index: len(lost) >= index)
    fleet.engine.say(job, "e", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    await until(lambda: len(worker.roster) == 0)
    assert len(lost) == 3
    assert await fleet.text(job) == "abcde"
    assert bytes((await fleet.result(job)).token_ids) == b"abcde"


async def test_a_log_that_lost_its_end_is_gone_on_with_from_what_is_left(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "abc")
    await until(lambda: fleet.shows(job, "abc"))
    fleet.engine.say(job, "def")
    await until(lambda: fleet.shows(job, "abcdef"))
    names = fleet.connection.keys(0)
    ((entry, kept), _) = await fleet.redis.xrange(names.events(job))
    await fleet.redis.delete(names.events(job))  # as after a restart that lost the last second
    await fleet.redis.xadd(names.events(job), kept, id=entry)
    await fleet.redis.hset(names.job(job), mapping={"offset": 3, "last": entry})
    fleet.engine.say(job, "ghi")
    await until(lambda: fleet.engine.requests[job].id == f"{job}/2")
    assert fleet.engine.requests[job].resume == (tuple(b"abc"),)
    fleet.engine.say(job, "DEF", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "abcDEF"


async def test_a_flushed_script_cache_is_no_outage(fleet, until) -> None:
    worker = fleet.worker()
    for _ in range(3):
        job = await fleet.submit()
        await until(lambda job=job: fleet.has(job))
        await fleet.redis.script_flush()
        fleet.engine.say(job, "x")
        await fleet.redis.script_flush()
        fleet.engine.say(job, "y", "stop")
        await until(lambda job=job: fleet.is_(job, "finished"))
        assert await fleet.text(job) == "xy"
    assert worker.not_ready() == []


async def test_a_worker_without_redis_ends_with_its_own_exit_code(own_fleet, monkeypatch) -> None:
    monkeypatch.setattr("tokenfleet.worker.parts.CONNECT_TIMEOUT_S", 0.3)
    await in_thread(own_fleet.server.stop)
    own_fleet.worker()
    assert await own_fleet.runs[0] == 3


async def test_a_drain_without_redis_ends_when_the_leases_have(own_fleet, until) -> None:
    fleet = own_fleet
    worker = fleet.worker(lease_s=0.9, grace_s=0)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    await in_thread(fleet.server.stop)
    worker.drain()
    assert await fleet.runs[0] == 0


async def test_a_job_whose_keys_are_broken_is_dropped_and_the_others_go_on(fleet, until) -> None:
    worker = fleet.worker(max_num_seqs=3)
    jobs = [await fleet.submit() for _ in range(3)]
    await until(lambda: fleet.has(*jobs))
    bad, *good = jobs
    await fleet.redis.set(fleet.connection.keys(0).events(bad), "not a stream")
    for job in jobs:
        fleet.engine.say(job, "abc")
    for job in good:
        fleet.engine.say(job, "def", "stop")
        await until(lambda job=job: fleet.is_(job, "finished"))
        assert await fleet.text(job) == "abcdef"
    await until(lambda: len(worker.roster) == 0)
    assert (bad, None) in fleet.engine.aborted


async def test_a_log_that_lost_its_end_before_the_finish_is_made_again(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "abc")
    await until(lambda: fleet.shows(job, "abc"))
    names = fleet.connection.keys(0)
    await fleet.redis.delete(names.events(job))
    await fleet.redis.hset(names.job(job), mapping={"offset": 0, "last": "0-0"})
    fleet.engine.say(job, "def", "stop")
    await until(lambda: fleet.engine.requests[job].id == f"{job}/2")
    fleet.engine.say(job, "abcdef", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "abcdef"


async def test_running_jobs_survive_a_flushed_server(own_fleet, until, often_renewed) -> None:
    fleet = own_fleet
    worker = fleet.worker(max_num_seqs=3)
    speaking, silent, ending = [await fleet.submit() for _ in range(3)]
    await until(lambda: fleet.has(speaking, silent, ending))
    for job in (speaking, ending):
        fleet.engine.say(job, "ab")
        fleet.engine.say(job, "c")
        await until(lambda job=job: fleet.shows(job, "abc"))
    before = [event.text for event in await fleet.log(speaking)]
    await fleet.redis.flushall()
    fleet.engine.say(speaking, "def")
    fleet.engine.say(ending, "!", "stop")
    await until(lambda: fleet.shows(speaking, "abcdef"))
    await until(lambda: fleet.is_(ending, "finished"))
    await until(lambda: fleet.is_(silent, "running"))  # found at a renewal
    assert [e.text for e in (await fleet.log(speaking))[: len(before)]] == before
    assert await fleet.field(speaking, "attempt") == "2"
    assert (await fleet.result(ending)).text == "abc!"
    for job in (speaking, silent):
        fleet.engine.say(job, ".", "stop")
        await until(lambda job=job: fleet.is_(job, "finished"))
    assert fleet.engine.aborted == []
    await until(lambda: len(worker.roster) == 0)
    later = await fleet.submit()
    await until(lambda: fleet.has(later))


async def test_a_second_flush_of_the_same_job_is_taken_for_an_order(own_fleet, until) -> None:
    fleet = own_fleet
    worker = fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    for text in ("a", "b"):
        fleet.engine.say(job, text)
        await until(lambda text=text: _ends(fleet, job, text))
        await fleet.redis.flushall()
    fleet.engine.say(job, "c")
    await until(lambda: (job, None) in fleet.engine.aborted)
    await until(lambda: len(worker.roster) == 0)
    assert await fleet.state(job) == ""


async def _ends(fleet, job: str, text: str) -> bool:
    return (await fleet.text(job)).endswith(text)


async def test_what_a_dead_engine_made_while_redis_was_away_is_not_made_again(
    own_fleet, until, monkeypatch
) -> None:
    fleet = own_fleet
    worker = fleet.worker(lease_s=60)
    handing_over = asyncio.Event()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "before ")
    await until(lambda: fleet.shows(job, "before "))
    still = worker.parts.publisher.still

    @asynccontextmanager
    async def told(partition):
        async with still(partition) as publish:
            handing_over.set()
            yield publish

    monkeypatch.setattr(worker.parts.publisher, "still", told)
    await in_thread(fleet.server.stop)
    fleet.engine.say(job, "meanwhile ")
    await until(lambda: "Redis is not reachable" in worker.not_ready())
    fleet.engine.die()
    await handing_over.wait()
    await in_thread(fleet.server.start)
    await fleet.redis.connection_pool.disconnect()
    await until(lambda: job in fleet.engine.requests and fleet.engine.requests[job].resume)
    assert fleet.engine.requests[job].resume == (tuple(b"before meanwhile "),)
    fleet.engine.say(job, "after", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "before meanwhile after"
