"""Each script's claims, on a real server: what it does, and what it refuses to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenfleet.producer.errors import IdempotencyMismatch
from tokenfleet.producer.keys import GROUP, keys_of, new_job_id
from tokenfleet.producer.protocol import Choice, Event, EventError, JobRequest, JobResult
from tokenfleet.worker.queue import Emission, LogBehind

RESULT = JobResult(choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="length"),))


def token(offset: int, *ids: int, attempt: int = 1, **more: Any) -> Event:
    ids = ids or (offset,)
    text = "".join(f"{i} " for i in ids)
    return Event(offset=offset, token_ids=ids, text=text, attempt=attempt, **more)


def emission(job: Any, start: int, *events: Event) -> Emission:
    return Emission(job.id, job.attempt, start, events)


# submit


async def test_a_repeated_submit_makes_one_job(lab):
    draft = lab.submission.draft(_request())
    first = await lab.submission.send([draft])
    second = await lab.submission.send([draft])
    assert first == second
    assert await lab.entries() == 1


async def test_an_idempotency_key_brings_back_the_first_job_also_after_its_end(lab):
    queue = await lab.queue()
    first = await lab.submit(idempotency_key="k")
    (job,) = await queue.claim(1)
    assert await queue.finish(job, [], RESULT)
    (again,) = await lab.submission.send([lab.submission.draft(_request(idempotency_key="k"))])
    assert (again.id, again.deduplicated) == (first, True)


async def test_an_idempotency_key_with_another_payload_is_refused(lab):
    await lab.submit(idempotency_key="k")
    with pytest.raises(IdempotencyMismatch, match="k"):
        await lab.submit(idempotency_key="k", prompt="something else")


async def test_an_idempotency_key_whose_job_is_gone_counts_as_new(lab):
    first = await lab.submit(idempotency_key="k")
    await lab.raw.delete(lab.keys.job(first))
    assert await lab.submit(idempotency_key="k", prompt="something else") != first


async def test_tenants_have_idempotency_keys_of_their_own(lab):
    ids = {await lab.submit(idempotency_key="k", tenant=tenant) for tenant in ("a", "b")}
    assert len(ids) == 2


async def test_the_trace_does_not_count_as_payload(lab):
    draft = lab.submission.draft(_request(idempotency_key="k"), {"traceparent": "00-a-b-01"})
    other = lab.submission.draft(_request(idempotency_key="k"), {"traceparent": "00-c-d-01"})
    first, second = await lab.submission.send([draft]), await lab.submission.send([other])
    assert first[0].id == second[0].id


# claim


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
    events = (token(0, 7, 8), Event(offset=2, text="held", attempt=1))
    await queue.emit([emission(job, 0, *events)])
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


# emit


async def test_an_emission_repeated_after_a_lost_reply_is_logged_once(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    events = (token(0, 1), Event(offset=1, text="held", attempt=1), token(1, 2, 3))
    for _ in range(3):
        outcome = await queue.emit([emission(job, 0, *events)])
        assert not outcome.behind
        assert not outcome.fenced
    assert tuple(await lab.log(job_id)) == events


async def test_an_emission_merged_with_later_events_continues_where_the_log_ends(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    await queue.emit([emission(job, 0, token(0, 1))])
    await queue.emit([emission(job, 0, token(0, 1), token(1, 2), token(2, 3))])
    assert [event.offset for event in await lab.log(job_id)] == [0, 1, 2]


@pytest.mark.parametrize("start", [1, 5])
async def test_an_emission_that_does_not_meet_the_end_of_the_log_is_behind(lab, start):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    await queue.emit([emission(job, 0, token(0, 1, 2, 3))])
    outcome = await queue.emit([emission(job, start, token(start, 9, 9, 9))])
    assert outcome.behind == {job_id}
    assert outcome.logged == {job_id: 3}
    assert len(await lab.log(job_id)) == 1


async def test_a_zombie_can_neither_emit_nor_finish_nor_release_nor_fail(lab):
    zombie_queue, queue = await lab.queue("zombie"), await lab.queue("w2")
    job_id = await lab.submit()
    (zombie,) = await zombie_queue.claim(1)
    await lab.expire_lease(zombie)
    assert await queue.reclaim() == 1
    (job,) = await queue.claim(1)
    outcome = await zombie_queue.emit([emission(zombie, 0, token(0, 666))])
    assert outcome.fenced == {job_id}
    assert await zombie_queue.renew([zombie]) == {job_id}
    assert not await zombie_queue.finish(zombie, [token(0, 666)], RESULT)
    assert await zombie_queue.release([zombie], "test") == frozenset()
    assert await zombie_queue.fail(zombie, "c", "m", retryable=True) is None
    assert await lab.log(job_id) == []
    assert (await lab.fields(job_id))["owner"] == "w2"
    assert await queue.finish(job, [token(0, 1, attempt=2)], RESULT)


async def test_one_call_settles_each_job_on_its_own(lab):
    queue = await lab.queue()
    for _ in range(3):
        await lab.submit()
    good, behind, fenced = await queue.claim(3)
    await queue.finish(fenced, [], RESULT)
    outcome = await queue.emit(
        [emission(behind, 4, token(4)), emission(fenced, 0, token(0)), emission(good, 0, token(0))]
    )
    assert (outcome.behind, outcome.fenced) == ({behind.id}, {fenced.id})
    assert len(await lab.log(good.id)) == 1


async def test_256_jobs_are_emitted_in_one_call(lab):
    queue = await lab.queue()
    for _ in range(256):
        await lab.submit()
    jobs = await queue.claim(128) + await queue.claim(128)
    before = await _calls(lab)
    outcome = await queue.emit([emission(job, 0, token(0, 1, 2, 3)) for job in jobs])
    assert (outcome.behind, outcome.fenced) == (frozenset(), frozenset())
    assert await _calls(lab) - before <= 2  # EVALSHA, and EVAL where the script was not known


# finish


async def test_finish_leaves_nothing_behind_in_the_queue(lab):
    queue = await lab.queue()
    job_id = await lab.submit(idempotency_key="k", deadline_s=60)
    (job,) = await queue.claim(1)
    assert await queue.finish(job, [token(0, 1, 2)], RESULT)
    fields = await lab.fields(job_id)
    assert fields["state"] == "finished"
    assert "request" not in fields
    assert await lab.entries() == 0
    for index in (lab.keys.live, lab.keys.deadline, lab.keys.delay):
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
        assert await queue.finish(job, [token(0, 1, 2)], RESULT)
    log = await lab.log(job_id)
    assert [event.final for event in log] == [False, True]
    assert (log[-1].finish_reason, log[-1].offset) == ("length", 2)


async def test_a_terminal_event_with_tokens_is_logged_as_tokens_and_an_end(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    assert await queue.finish(job, [token(0, 1, 2, final=True, finish_reason="stop")], RESULT)
    tokens, end = await lab.log(job_id)
    assert (tokens.token_ids, tokens.final) == ((1, 2), False)
    assert (end.token_ids, end.final, end.finish_reason) == ((), True, "stop")


async def test_finish_says_when_redis_has_lost_part_of_the_log(lab):
    queue = await lab.queue()
    await lab.submit()
    (job,) = await queue.claim(1)
    with pytest.raises(LogBehind) as caught:
        await queue.finish(job, [token(3, 1)], RESULT)
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
    outcome = await queue.emit([emission(job, 0, token(0))])
    assert (outcome.cancelled, outcome.expired) == ({job_id}, {job_id})
    assert await queue.finish(job, [], None, state="cancelled")
    assert await lab.state(job_id) == "expired"
    assert (await lab.log(job_id))[-1].finish_reason == "expired"


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
        before = await _server_ms(lab)
        assert await queue.fail(job, "boom", "it broke", retryable=True) == "waiting"
        due = await lab.raw.zscore(lab.keys.delay, job_id)
        assert before <= due - back_off_ms <= await _server_ms(lab)
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
        await queue.emit([emission(job, offset, token(offset, attempt=job.attempt))])
        assert await queue.fail(job, "boom", "it broke", retryable=True) == "waiting"
        await lab.raw.zadd(lab.keys.delay, {job_id: 1})
    assert (await lab.fields(job_id))["failures"] == "1"


async def test_a_job_may_bring_its_own_number_of_failures(lab):
    queue = await lab.queue(max_failures=3)
    await lab.submit(max_failures=0)
    (job,) = await queue.claim(1)
    assert await queue.fail(job, "boom", "it broke", retryable=True) == "failed"


async def test_a_failure_that_cannot_be_retried_fails_the_job_without_a_dead_letter(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    assert await queue.fail(job, "too_long", "shorten it", retryable=False) == "failed"
    assert await lab.raw.zscore(lab.keys.dead, job_id) is None
    assert (await lab.log(job_id))[-1].error == EventError("too_long", "shorten it")


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
            [emission(job, attempt - 1, token(attempt - 1, attempt=attempt))]
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
        await ear.get_message(timeout=5)
        assert await lab.client().job(job_id).cancel() == "running"
        told = (await ear.get_message(timeout=5))["data"]
        outcome = await queue.emit([emission(job, 0, token(0))])
        await queue.renew([job])
        told_again = (await ear.get_message(timeout=5))["data"]
    assert told == told_again == f"cancel {job_id} 1".encode()
    assert outcome.cancelled == {job_id}
    assert await queue.finish(job, [], None, state="cancelled")
    assert await lab.state(job_id) == "cancelled"


async def test_a_delayed_job_can_be_cancelled(lab):
    job_id = await lab.submit(delay_s=3600)
    assert await lab.client().job(job_id).cancel() == "cancelled"
    assert await lab.raw.zcard(lab.keys.delay) == 0


# wait


async def test_an_idle_worker_is_woken_by_a_new_job(lab):
    queue = await lab.queue()
    assert await queue.claim(1) == []
    waiting = asyncio.create_task(queue.wait(60))
    await asyncio.sleep(0)
    await lab.submit()
    assert await waiting


async def test_a_job_that_came_between_claim_and_wait_is_not_slept_through(lab):
    queue = await lab.queue()
    assert await queue.claim(1) == []
    await lab.submit()
    assert await queue.wait(60)


async def test_an_idle_worker_is_woken_by_a_released_job_and_a_due_one(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    await lab.submit()
    (job,) = await other.claim(1)
    assert await queue.claim(1) == []
    await other.release([job], "test")
    assert await queue.wait(60)
    assert len(await queue.claim(1)) == 1
    delayed = await lab.submit(delay_s=0.05)
    assert await queue.claim(1) == []
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


def _request(**fields: Any) -> Any:
    return JobRequest(**{"model": "m", "prompt": "x", **fields})


async def _server_ms(lab: Any) -> int:
    seconds, micros = await lab.raw.time()
    return int(seconds * 1000 + micros // 1000)


async def _calls(lab: Any) -> int:
    stats = await lab.raw.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))


async def test_a_job_id_names_its_partition(lab):
    job_id = new_job_id(3)
    assert keys_of("n", job_id).prefix == "{n:3}"
