"""Leases: renewed, run out and moved on, and claims nobody knows of."""

from __future__ import annotations

import asyncio

from tokenfleet.producer.protocol import Choice, JobResult
from tokenfleet.worker.claims import flat

RESULT = JobResult(choices=(Choice(text="a", token_ids=(1,), finish_reason="length"),))

# renew and reclaim


async def test_a_renewed_lease_is_not_reclaimed(lab):
    queue, reaper = await lab.queue("w1"), await lab.queue("w2")
    await lab.submit()
    (job,) = await queue.claim(1)
    await lab.expire_lease(job)
    assert await queue.renew([job]) == frozenset()
    assert await reaper.reclaim() == 0


async def test_each_lease_has_the_length_its_owner_asked_for(lab):
    patient, hasty = await lab.queue("w1", lease_s=7200.0), await lab.queue("w2", lease_s=1.0)
    await lab.submit()
    (job,) = await patient.claim(1)
    await lab.expire_lease(job)
    assert await hasty.reclaim() == 0


async def test_many_reapers_move_a_job_once(lab):
    queues = [await lab.queue(f"w{n}") for n in range(8)]
    job_id = await lab.submit()
    for attempt in range(1, 21):
        (job,) = await queues[attempt % 8].claim(1)
        assert job.attempt == attempt
        await queues[attempt % 8].emit(
            [lab.emission(job, attempt - 1, lab.token(attempt - 1, attempt=attempt))]
        )
        await lab.expire_lease(job)
        assert sum(await asyncio.gather(*(queue.reclaim() for queue in queues))) == 1
    assert await lab.entries() == 1
    assert (await lab.fields(job_id))["offset"] == "20"


async def test_a_job_that_kills_its_workers_is_dead_lettered(lab):
    queue = await lab.queue(max_failures=2)
    job_id = await lab.submit()
    for _ in range(3):
        (job,) = await queue.claim(1)
        await lab.expire_lease(job)
        assert await queue.reclaim() == 1
    fields = await lab.fields(job_id)
    assert (fields["state"], fields["error_code"]) == ("failed", "worker_died")
    assert await queue.claim(1) == []


async def test_an_expired_lease_of_a_cancelled_job_ends_it(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    await lab.client().job(job_id).cancel()
    await lab.expire_lease(job)
    assert await queue.reclaim() == 1
    assert await lab.state(job_id) == "cancelled"


async def test_a_waiting_job_expires_at_its_deadline_wherever_it_stands_in_the_queue(lab):
    queue = await lab.queue()
    for _ in range(5):
        await lab.submit()
    late = await lab.submit(deadline_s=3600)
    await lab.raw.hset(lab.keys.job(late), "deadline", 1)
    await lab.raw.zadd(lab.keys.deadline, {late: 1})
    assert await queue.reclaim() == 1
    assert await lab.state(late) == "expired"
    assert len(await queue.claim(9)) == 5


# phantoms


async def test_only_what_is_held_and_unknown_is_released(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    for _ in range(4):
        await lab.submit()
    known, *phantoms = await queue.claim(3)
    await other.claim(1)
    assert await queue.release_phantoms([known.id]) == {job.id for job in phantoms}
    assert await queue.release_phantoms([known.id]) == frozenset()
    again = await queue.claim(4)
    assert sorted(job.id for job in again) == sorted(job.id for job in phantoms)
    assert {job.failures for job in again} == {0}


async def test_a_dead_workers_job_is_moved_on_however_slow_another_job_is(lab):
    slow_queue, dead_queue, reaper = [await lab.queue(name) for name in ("slow", "dead", "w3")]
    await lab.submit()
    await lab.submit()
    (slow,) = await slow_queue.claim(1)
    (dead,) = await dead_queue.claim(1)
    for job in (slow, dead):
        await lab.expire_lease(job)
    await slow_queue.renew([slow])
    assert await reaper.reclaim() == 1
    assert [job.id for job in await reaper.claim(2)] == [dead.id]
    assert (await lab.fields(slow.id))["owner"] == "slow"


async def test_a_finish_at_the_moment_the_lease_ends_makes_one_end_that_never_changes(lab):
    queue, reaper = await lab.queue("w1"), await lab.queue("w2")
    for number in range(20):
        job_id = await lab.submit()
        (job,) = await queue.claim(1)
        await lab.expire_lease(job)
        calls = [queue.finish(job, flat([lab.token(0)]), RESULT), reaper.reclaim()]
        first, second = await asyncio.gather(*(calls if number % 2 else calls[::-1]))
        finished = first if number % 2 else second
        if not finished:
            assert await lab.log(job_id) == []
            (again,) = await reaper.claim(1)
            assert await reaper.finish(again, flat([lab.token(0, attempt=2)]), RESULT)
        assert await lab.state(job_id) == "finished"
        assert [event.final for event in await lab.log(job_id)] == [False, True]
        assert await reaper.claim(1) == []
        assert await reaper.reclaim() == 0


async def test_eight_reapers_on_one_expired_lease_five_hundred_times(valkey_lab):
    lab, rounds = valkey_lab, 500
    queues = [await lab.queue(f"w{n}", max_failures=rounds) for n in range(8)]
    job_id = await lab.submit()
    for attempt in range(1, rounds + 1):
        (job,) = await queues[attempt % 8].claim(1)
        assert job.attempt == attempt
        await lab.expire_lease(job)
        assert sum(await asyncio.gather(*(queue.reclaim() for queue in queues))) == 1
    assert (await lab.fields(job_id))["failures"] == str(rounds)
