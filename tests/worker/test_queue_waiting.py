"""What waits: cancelled jobs, idle workers; and the table of those who serve."""

from __future__ import annotations

import asyncio

from tokenfleet.producer.keys import GROUP

# cancel


async def test_a_waiting_job_is_cancelled_with_no_worker_up_and_never_runs(lab):
    job_id = await lab.submit()
    assert await lab.client().job(job_id).cancel() == "cancelled"
    (event,) = await lab.log(job_id)
    assert (event.final, event.finish_reason, event.attempt) == (True, "cancelled", 0)
    queue = await lab.queue()
    assert await queue.claim(1) == []
    assert await lab.entries() == 0


async def test_cancelling_a_waiting_job_leaves_the_backlog_countable(lab):
    queue = await lab.queue()
    for _ in range(3):
        await lab.submit()
    await lab.client().job(await lab.submit()).cancel()
    await queue.claim(1)
    groups = await lab.raw.xinfo_groups(lab.keys.queue("m", "default"))
    assert groups[0]["lag"] is not None


async def test_the_worker_of_a_running_job_hears_of_the_cancel_three_ways(lab):
    queue = await lab.queue("w1")
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    async with lab.raw.pubsub() as ear:
        await ear.subscribe(lab.keys.control("w1"))
        await ear.get_message(timeout=240)
        assert await lab.client().job(job_id).cancel() == "running"
        told = (await ear.get_message(timeout=240))["data"]
        outcome = await queue.emit([lab.emission(job, 0, lab.token(0))])
        await queue.renew([job])
        told_again = (await ear.get_message(timeout=240))["data"]
    assert told == told_again == f"cancel {job_id} 1".encode()
    assert outcome.cancelled == {job_id}
    assert await queue.finish(job, [], None, state="cancelled")
    assert await lab.state(job_id) == "cancelled"


async def test_a_delayed_job_can_be_cancelled(lab):
    job_id = await lab.submit(delay_s=3600)
    assert await lab.client().job(job_id).cancel() == "cancelled"
    assert await lab.raw.zcard(lab.keys.delay) == 0


# wait


async def test_an_idle_worker_is_woken_by_a_new_job(lab, rung):
    queue = await lab.queue()
    assert await queue.claim(1) == []
    waiting = asyncio.create_task(rung(queue))
    await asyncio.sleep(0)
    await lab.submit()
    await waiting


async def test_a_job_that_came_between_claim_and_wait_is_not_slept_through(lab, rung):
    queue = await lab.queue()
    assert await queue.claim(1) == []
    await lab.submit()
    await rung(queue)


async def test_a_worker_does_not_wait_behind_entries_that_one_claim_could_not_drop(lab, rung):
    queue = await lab.queue()
    async with lab.raw.pipeline(transaction=False) as entries:
        for number in range(1001):  # of jobs that have ended and are forgotten by now
            entries.xadd(lab.keys.queue("m", "default"), {"j": f"gone{number}"})
        await entries.execute()
    job_id = await lab.submit()
    rounds = 0
    while not (claimed := await queue.claim(1)):
        await rung(queue)
        rounds += 1
    assert ([job.id for job in claimed], rounds) == ([job_id], 1)


async def test_an_idle_worker_is_woken_by_a_released_job_and_a_due_one(lab, rung):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    await lab.submit()
    (job,) = await other.claim(1)
    assert await queue.claim(1) == []
    await other.release([job], "test")
    await rung(queue)
    assert len(await queue.claim(1)) == 1
    delay_s = 0.05
    delayed = await lab.submit(delay_s=delay_s)
    while await queue.claim(1):  # a slow machine needs a later moment for it not to be due yet
        delay_s *= 2
        delayed = await lab.submit(delay_s=delay_s)
    assert await queue.wait(60) is False  # the time was over: the job is due
    assert [job.id for job in await queue.claim(1)] == [delayed]


async def test_an_idle_worker_waits_beyond_one_blocking_call_without_an_error(valkey_lab):
    queue = await valkey_lab.queue()
    assert await queue.claim(1) == []
    assert await queue.wait(2.3) is False
    assert await queue.wait(0.1) is False


# the worker table


async def test_a_worker_shows_itself_and_leaves(lab):
    queue = await lab.queue("w1")
    job = lab.client().job(await lab.submit())
    assert not (await job.status()).served
    seconds, _ = await lab.raw.time()
    assert abs(await queue.heartbeat({"slots": 4}) / 1000 - seconds) < 60
    assert (await job.status()).served
    await queue.leave()
    assert not (await job.status()).served
    consumers = await lab.raw.xinfo_consumers(lab.keys.queue("m", "default"), GROUP)
    assert consumers == []


async def test_a_worker_of_another_model_does_not_serve(lab):
    await (await lab.queue("w1", model_name="other")).heartbeat({})
    assert not (await lab.client().job(await lab.submit()).status()).served


async def test_an_evicting_memory_policy_is_warned_of(own_lab):
    await own_lab.raw.config_set("maxmemory-policy", "allkeys-lru")
    (warning,) = await (await own_lab.queue()).ensure()
    assert "allkeys-lru" in warning
    await own_lab.raw.config_set("maxmemory-policy", "noeviction")
    assert await (await own_lab.queue("w2")).ensure() == []


async def test_the_backlog_is_right_where_the_groups_lag_is_not(lab):
    queue, stream = await lab.queue(), lab.keys.queue("m", "default")
    for _ in range(4):
        await lab.submit()
    await queue.claim(1)
    entry, _ = (await lab.raw.xrevrange(stream, count=2))[1]
    await lab.raw.xdel(stream, entry)
    (group,) = await lab.raw.xinfo_groups(stream)
    assert group["lag"] != 2
    assert (await queue.backlog())["default"] == 2
