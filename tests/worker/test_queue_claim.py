"""Claiming: as many as asked for, the most urgent first, each job by one worker."""

from __future__ import annotations

import asyncio

from tokenfleet.producer.protocol import Event


async def test_a_claim_takes_no_more_than_it_asks_for_over_all_classes(lab):
    queue = await lab.queue()
    for priority in ("batch", "default", "interactive") * 4:
        await lab.submit(priority=priority)
    assert len(await queue.claim(5)) == 5
    assert sum((await queue.backlog()).values()) == 7


async def test_the_most_urgent_class_is_served_first(lab):
    queue = await lab.queue()
    ids = {p: await lab.submit(priority=p) for p in ("batch", "default", "interactive")}
    claimed = [job.id for job in await queue.claim(3)]
    assert claimed == [ids["interactive"], ids["default"], ids["batch"]]


async def test_a_claim_carries_what_earlier_attempts_logged(lab):
    queue = await lab.queue()
    await lab.submit()
    (job,) = await queue.claim(1)
    events = (lab.token(0, 7, 8), Event(offset=2, text="held", attempt=1))
    await queue.emit([lab.emission(job, 0, *events)])
    await queue.release([job], "test")
    (again,) = await queue.claim(1)
    assert (again.attempt, again.offset, again.logged) == (2, 2, events)


async def test_a_delayed_job_is_not_claimed_before_its_time(lab):
    queue = await lab.queue()
    job_id = await lab.submit(delay_s=3600)
    assert await queue.claim(1) == []
    await lab.raw.zadd(lab.keys.delay, {job_id: 1})
    assert [job.id for job in await queue.claim(1)] == [job_id]


async def test_a_job_nobody_can_read_is_dead_lettered_with_the_reason_and_harms_no_other(lab):
    queue = await lab.queue()
    bad, good = await lab.submit(), await lab.submit()
    await lab.raw.hset(lab.keys.job(bad), "request", b"\xc1 no msgpack")
    assert [job.id for job in await queue.claim(2)] == [good]
    fields = await lab.fields(bad)
    assert (fields["state"], fields["error_code"]) == ("failed", "undecodable")
    assert (await lab.log(bad))[-1].error.code == "undecodable"
    assert await lab.raw.zscore(lab.keys.dead, bad) is not None
    assert await lab.entries() == 1


async def test_an_entry_whose_job_is_gone_is_dropped(lab):
    queue = await lab.queue()
    await lab.raw.delete(lab.keys.job(await lab.submit()))
    alive = await lab.submit()
    assert [job.id for job in await queue.claim(1)] == [alive]
    assert await lab.entries() == 1


async def test_a_job_past_its_deadline_is_never_claimed(lab):
    queue = await lab.queue()
    late = await lab.submit(deadline_s=3600)
    await lab.raw.hset(lab.keys.job(late), "deadline", 1)
    assert await queue.claim(1) == []
    assert await lab.state(late) == "expired"
    (event,) = await lab.log(late)
    assert (event.final, event.finish_reason) == (True, "expired")
    assert await lab.entries() == 0


async def test_two_workers_never_hold_one_job(lab):
    queues = [await lab.queue(f"w{n}") for n in range(4)]
    ids = {await lab.submit() for _ in range(40)}
    claimed = await asyncio.gather(*(queue.claim(7) for queue in queues for _ in range(2)))
    found = [job.id for jobs in claimed for job in jobs]
    assert sorted(found) == sorted(ids)
