"""The life of jobs, the same on every kind of server: one suite, three servers."""

from __future__ import annotations

import asyncio

import pytest

from tokenfleet.producer import DeadlineExceeded, IdempotencyMismatch, JobCancelled
from tokenfleet.producer.fleet import FleetReader


async def test_many_jobs_stream_whole_and_leave_nothing_behind(site, until, answer) -> None:
    site.worker(max_num_seqs=16)
    jobs = [await site.submit(f"job {i} ", 20 + i, n=1 + (i % 7 == 0)) for i in range(40)]
    for number, events in enumerate(await asyncio.gather(*map(site.follow, jobs))):
        text = "".join(e.text for e in events if e.choice == 0)
        assert text == answer(f"job {number} ", 20 + number)
    assert {(await job.status()).state for job in jobs} == {"finished"}
    await until(lambda: _is(site.pending(), 0))


async def test_a_cancel_reaches_a_running_job_before_its_next_token(site, until) -> None:
    worker = site.worker(flush_interval_ms=3_600_000)
    job = await site.submit("endless ", 5000)
    await until(lambda: _started(job))
    worker.engine.may_step.clear()  # no token, so no emit that could tell
    await job.cancel()
    await until(lambda: _state(job, "cancelled"))
    with pytest.raises(JobCancelled):
        await job.result(timeout_s=240)
    await until(lambda: len(worker.service.roster) == 0)


async def test_a_waiting_job_ends_by_cancel_and_by_deadline_with_no_worker_up(site) -> None:
    cancelled = await site.submit("a", 5)
    assert await cancelled.cancel() == "cancelled"
    late = await site.submit("b", 5, deadline_s=0.05)
    assert [e.finish_reason async for e in late.stream()][-1] == "expired"
    with pytest.raises(DeadlineExceeded):
        await late.result(timeout_s=240)
    site.worker()
    other = await site.submit("c", 5)
    await site.follow(other)
    assert [(e.attempt, e.final) async for e in cancelled.stream()] == [(0, True)]


async def test_a_delayed_job_and_an_idempotent_one_run_once(site) -> None:
    site.worker()
    delay_s = 0.2
    later = await site.submit("later ", 9, delay_s=delay_s)
    while (await later.status()).state != "waiting":  # a slow machine needs a later moment
        delay_s *= 2
        later = await site.submit("later ", 9, delay_s=delay_s)
    first = await site.submit("once ", 9, idempotency_key="k")
    again = await site.submit("once ", 9, idempotency_key="k")
    assert (again.id, again.deduplicated) == (first.id, True)
    with pytest.raises(IdempotencyMismatch):
        await site.submit("twice ", 9, idempotency_key="k")
    await asyncio.gather(site.follow(later), site.follow(first))
    again = await site.submit("once ", 9, idempotency_key="k")
    assert again.id == first.id


async def test_what_a_dead_worker_had_begun_goes_on_elsewhere(site, until, answer) -> None:
    first = site.worker(lease_s=3)
    jobs = [await site.submit(f"job {i} ", 300) for i in range(8)]
    following = asyncio.gather(*map(site.follow, jobs))
    await until(lambda: _all_started(jobs))
    first.engine.may_step.clear()
    await first.die()
    site.worker(lease_s=3)
    for number, events in enumerate(await following):
        assert "".join(e.text for e in events) == answer(f"job {number} ", 300)
        assert next(e.attempt for e in events if e.token_ids) == 1
        assert events[-1].attempt > 1
    assert all([(await job.status()).failures >= 1 for job in jobs])


async def test_a_drained_worker_hands_over_without_a_failure(site, until, answer) -> None:
    first = site.worker(grace_s=0)
    jobs = [await site.submit(f"job {i} ", 300) for i in range(6)]
    following = asyncio.gather(*map(site.follow, jobs))
    await until(lambda: _all_started(jobs))
    assert await first.drain() == 0
    site.worker()
    for number, events in enumerate(await following):
        assert "".join(e.text for e in events) == answer(f"job {number} ", 300)
    assert {(await job.status()).failures for job in jobs} == {0}


async def test_a_job_ends_with_its_last_subscriber_when_it_asked_for_that(site, until) -> None:
    site.worker()
    job = await site.submit("endless ", 5000, on_disconnect="cancel")
    stream = job.stream()
    await anext(stream)
    await stream.aclose()
    await until(lambda: _state(job, "cancelled"))


async def test_the_fleet_is_seen_from_outside(site, until) -> None:
    worker = site.worker(max_num_seqs=4)
    running = [await site.submit("endless ", 5000) for _ in range(4)]
    await until(lambda: _all_started(running))
    waiting = [await site.submit("x", 5, priority="batch") for _ in range(3)]
    view = FleetReader(site.connection)
    depths = {depth.priority: depth for depth in await view.queues()}
    assert (depths["default"].running, depths["batch"].waiting) == (4, 3)
    seen = await until(lambda: view.workers())
    assert [line["worker"] for line in seen] == [worker.service.worker_id]
    assert (await waiting[0].status()).served
    for job in running:
        await job.cancel()
    await asyncio.gather(*map(site.follow, waiting))


async def _is(found, expected) -> bool:
    return await found == expected


async def _started(job) -> bool:
    return (await job.status()).offset > 0


async def _all_started(jobs) -> bool:
    return all([await _started(job) for job in jobs])


async def _state(job, state: str) -> bool:
    return (await job.status()).state == state
