"""Leases: renewed, run out and moved on, and claims nobody knows of."""

from __future__ import annotations

import asyncio

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
