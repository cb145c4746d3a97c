"""Claiming: as many as asked for, the most urgent first, each job by one worker."""

from __future__ import annotations

import asyncio

from tokenfleet.producer.protocol import Choice, Event, JobResult
from tokenfleet.worker.rules import Rules

RESULT = JobResult(choices=(Choice(text="a", token_ids=(1,), finish_reason="length"),))


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


async def test_nobody_claims_from_a_paused_queue_and_it_takes_jobs_all_the_same(lab):
    rules, queue = Rules(lab.connection), await lab.queue()
    await rules.pause("m", ["batch"])
    waiting, urgent = await lab.submit(priority="batch"), await lab.submit()
    assert [job.id for job in await queue.claim(9)] == [urgent]
    assert (await lab.client().job(waiting).status()).paused
    assert not (await lab.client().job(urgent).status()).paused
    await rules.resume("m")
    assert [job.id for job in await queue.claim(9)] == [waiting]


async def test_what_comes_back_to_a_paused_queue_waits_in_it(lab):
    rules, queue = Rules(lab.connection), await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    await rules.pause("m")
    await queue.release([job], "test")
    assert await queue.claim(1) == []
    await rules.resume("m")
    assert [job.id for job in await queue.claim(1)] == [job_id]


async def test_an_idle_worker_is_woken_when_its_queue_is_resumed(lab, rung):
    rules, queue = Rules(lab.connection), await lab.queue()
    await rules.pause("m")
    await lab.submit()
    assert await queue.claim(1) == []
    waiting = asyncio.create_task(rung(queue))
    await asyncio.sleep(0)
    await rules.resume("m")
    await waiting


async def test_the_scaling_signal_counts_what_runs_waits_and_is_due_and_survives_a_scale_in(lab):
    queue, model = await lab.queue(), "m"

    async def signal() -> int:
        return int(await lab.raw.zcount(lab.keys.live(model), "-inf", await lab.server_ms()))

    await lab.submit(delay_s=3600)
    assert await signal() == 0
    due = await lab.submit(delay_s=3600)
    await lab.raw.zadd(lab.keys.live(model), {due: 1})
    await lab.raw.zadd(lab.keys.delay, {due: 1})
    assert await signal() == 1
    ids = [await lab.submit() for _ in range(3)]
    await lab.submit(model="other")
    assert await signal() == 4
    first, second = await queue.claim(2)
    await queue.emit([lab.emission(first, 0, lab.token(0))])
    assert await signal() == 4
    await queue.release([first], "scale-in")
    assert await signal() == 4
    (again,) = await queue.claim(1)
    assert (again.id, again.offset) == (ids[0], 1)  # from its token on, not from zero
    await queue.finish(again, [], RESULT)
    await queue.fail(second, "c", "m", retryable=True)
    assert await signal() == 2  # the second one's next try is not due yet
