"""Ways a job leaves its worker: finished, released, failed."""

from __future__ import annotations

import pytest

from tokenfleet.producer.keys import GROUP
from tokenfleet.producer.protocol import Choice, EventError, JobResult
from tokenfleet.worker.claims import flat
from tokenfleet.worker.queue import LogBehind

RESULT = JobResult(choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="length"),))


# finish


async def test_finish_leaves_nothing_behind_in_the_queue(lab):
    queue = await lab.queue()
    job_id = await lab.submit(idempotency_key="k", deadline_s=60)
    (job,) = await queue.claim(1)
    assert await queue.finish(job, flat([lab.token(0, 1, 2)]), RESULT)
    fields = await lab.fields(job_id)
    assert fields["state"] == "finished"
    assert "request" not in fields
    assert await lab.entries() == 0
    for index in (lab.keys.live("m"), lab.keys.deadline, lab.keys.delay):
        assert await lab.raw.zcard(index) == 0
    pending = await lab.raw.xpending(lab.keys.queue("m", "default"), GROUP)
    assert pending["pending"] == 0
    kept = (lab.keys.job(job_id), lab.keys.events(job_id), lab.keys.idempotency("default", "k"))
    for key in kept:
        assert await lab.raw.pttl(key) > 0


async def test_a_repeated_finish_says_yes_and_writes_nothing(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    for _ in range(3):
        assert await queue.finish(job, flat([lab.token(0, 1, 2)]), RESULT)
    log = await lab.log(job_id)
    assert [event.final for event in log] == [False, True]
    assert (log[-1].finish_reason, log[-1].offset) == ("length", 2)


async def test_finish_says_when_redis_has_lost_part_of_the_log(lab):
    queue = await lab.queue()
    await lab.submit()
    (job,) = await queue.claim(1)
    with pytest.raises(LogBehind) as caught:
        await queue.finish(job, flat([lab.token(3, 1)]), RESULT)
    assert caught.value.logged == 0


@pytest.mark.parametrize("other", ["finished", "failed", "cancelled"])
async def test_a_terminal_state_never_changes(lab, other):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    assert await queue.finish(job, [], None, state="failed", error=EventError("c", "m"))
    assert await queue.finish(job, [], RESULT, state=other) is (other == "failed")
    assert await queue.reclaim() == 0
    await lab.client().job(job_id).cancel()
    assert await lab.state(job_id) == "failed"
    assert sum(event.final for event in await lab.log(job_id)) == 1


async def test_a_cancelled_job_whose_deadline_passed_and_nobody_cancelled_is_expired(lab):
    queue = await lab.queue()
    job_id = await lab.submit(deadline_s=3600)
    (job,) = await queue.claim(1)
    await lab.raw.hset(lab.keys.job(job_id), "deadline", 1)
    outcome = await queue.emit([lab.emission(job, 0, lab.token(0))])
    assert (outcome.cancelled, outcome.expired) == ({job_id}, {job_id})
    assert await queue.finish(job, [], None, state="cancelled")
    assert await lab.state(job_id) == "expired"
    assert (await lab.log(job_id))[-1].finish_reason == "expired"


async def test_a_finish_repeated_after_a_deadline_that_passed_meanwhile_says_yes(lab):
    queue = await lab.queue()
    job_id = await lab.submit(deadline_s=3600)
    (job,) = await queue.claim(1)
    assert await queue.finish(job, [], None, state="cancelled")
    await lab.raw.hset(lab.keys.job(job_id), "deadline", 1)
    assert await queue.finish(job, [], None, state="cancelled")
    assert await lab.state(job_id) == "cancelled"
    assert len(await lab.log(job_id)) == 1


# release


async def test_a_released_job_goes_to_the_front_and_costs_no_failure(lab):
    queue = await lab.queue()
    first = await lab.submit()
    (job,) = await queue.claim(1)
    await lab.submit()
    assert await queue.release([job], "test") == {first}
    (again,) = await queue.claim(1)
    assert (again.id, again.attempt, again.failures) == (first, 2, 0)


async def test_a_job_released_after_a_cancel_ends_instead(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    await lab.client().job(job_id).cancel()
    await queue.release([job], "test")
    assert await lab.state(job_id) == "cancelled"
    assert await lab.entries() == 0


# fail


async def test_back_off_is_a_due_time_that_grows_and_no_priority(lab):
    queue = await lab.queue(max_failures=3)
    job_id = await lab.submit()
    for back_off_ms in (1000, 2000, 4000):
        (job,) = await queue.claim(1)
        before = await lab.server_ms()
        assert await queue.fail(job, "boom", "it broke", retryable=True) == "waiting"
        due = await lab.raw.zscore(lab.keys.delay, job_id)
        assert before <= due - back_off_ms <= await lab.server_ms()
        fresh = await lab.submit()
        assert [job.id for job in await queue.claim(1)] == [fresh]
        await lab.raw.zadd(lab.keys.delay, {job_id: 1})


async def test_a_job_whose_failures_are_used_up_is_dead_lettered_with_the_reason(lab):
    queue = await lab.queue(max_failures=1)
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    assert await queue.fail(job, "boom", "it broke", retryable=True) == "waiting"
    await lab.raw.zadd(lab.keys.delay, {job_id: 1})
    (job,) = await queue.claim(1)
    assert await queue.fail(job, "boom", "it broke", retryable=True) == "failed"
    fields = await lab.fields(job_id)
    assert (fields["error_code"], fields["error_message"]) == ("boom", "it broke")
    assert "request" in fields
    assert await lab.raw.zscore(lab.keys.dead, job_id) is not None


async def test_progress_since_the_last_failure_resets_the_count(lab):
    queue = await lab.queue(max_failures=1)
    job_id = await lab.submit()
    for offset in range(6):
        (job,) = await queue.claim(1)
        await queue.emit([lab.emission(job, offset, lab.token(offset, attempt=job.attempt))])
        assert await queue.fail(job, "boom", "it broke", retryable=True) == "waiting"
        await lab.raw.zadd(lab.keys.delay, {job_id: 1})
    assert (await lab.fields(job_id))["failures"] == "1"


async def test_a_job_may_bring_its_own_number_of_failures(lab):
    queue = await lab.queue(max_failures=3)
    await lab.submit(max_failures=0)
    (job,) = await queue.claim(1)
    assert await queue.fail(job, "boom", "it broke", retryable=True) == "failed"


async def test_a_failure_behind_the_deadline_is_not_tried_again(lab):
    """A reaper that passed meanwhile looks at its deadline no more."""
    queue = await lab.queue()
    job_id = await lab.submit(deadline_s=60)
    (job,) = await queue.claim(1)
    await lab.raw.hset(lab.keys.job(job_id), "deadline", 1)
    await lab.raw.zadd(lab.keys.deadline, {job_id: 1})
    await queue.reclaim()
    assert await queue.fail(job, "boom", "it broke", retryable=True) == "expired"
    assert await lab.raw.zcard(lab.keys.delay) == 0
    assert (await lab.log(job_id))[-1].finish_reason == "expired"


async def test_a_failure_that_cannot_be_retried_fails_the_job_without_a_dead_letter(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    assert await queue.fail(job, "too_long", "shorten it", retryable=False) == "failed"
    assert await lab.raw.zscore(lab.keys.dead, job_id) is None
    assert (await lab.log(job_id))[-1].error == EventError("too_long", "shorten it")
