"""Limits of tenants: how many of their jobs run and wait, and that tenants take turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenfleet.producer.errors import QueueFull
from tokenfleet.producer.protocol import Choice, JobResult
from tokenfleet.worker.rules import EVERY_OTHER, Rules, TenantLimits

RESULT = JobResult(choices=(Choice(text="a", token_ids=(1,), finish_reason="length"),))


async def limit(lab: Any, tenant: str, running: int | None = None, waiting: int | None = None):
    await Rules(lab.connection).set_limits(TenantLimits(tenant, running, waiting))


async def members(lab: Any, tenant: str, state: str) -> set[str]:
    return {i.decode() for i in await lab.raw.smembers(lab.keys.tenant(tenant, state))}


def tenants_of(jobs: list[Any]) -> list[str]:
    return [job.request.tenant for job in jobs]


async def test_a_tenant_never_has_more_jobs_running_than_it_may(lab):
    await limit(lab, "a", running=2)
    queue = await lab.queue()
    ids = [await lab.submit(tenant="a") for _ in range(5)]
    first = await queue.claim(5)
    assert [job.id for job in first] == ids[:2]
    assert await queue.claim(5) == []
    assert await queue.finish(first[0], [], RESULT)
    assert [job.id for job in await queue.claim(5)] == ids[2:3]


async def test_the_limit_holds_over_all_models_and_classes_of_a_tenant(lab):
    await limit(lab, "a", running=1)
    queue, other = await lab.queue(), await lab.queue("w2", model_name="other")
    await lab.submit(tenant="a", priority="batch")
    await lab.submit(tenant="a", model="other")
    (job,) = await queue.claim(3)
    assert await other.claim(3) == []
    await queue.finish(job, [], RESULT)
    assert len(await other.claim(3)) == 1


async def test_a_tenant_at_its_limit_is_in_nobody_elses_way(lab):
    await limit(lab, "a", running=1)
    queue = await lab.queue()
    for _ in range(20):
        await lab.submit(tenant="a")
    free = [await lab.submit(tenant="b") for _ in range(3)]
    assert sorted(job.id for job in await queue.claim(10) if job.id in free) == sorted(free)


async def test_tenants_with_limits_take_turns_however_much_one_of_them_submits(lab):
    await limit(lab, EVERY_OTHER, running=100)
    queue = await lab.queue()
    for tenant, count in (("a", 20), ("b", 3), ("c", 3)):
        for _ in range(count):
            await lab.submit(tenant=tenant)
    assert tenants_of(await queue.claim(9)) == ["a", "b", "c"] * 3
    assert tenants_of(await queue.claim(2)) == ["a", "a"]


async def test_turns_go_on_where_the_last_claim_ended(lab):
    await limit(lab, EVERY_OTHER, running=100)
    queue = await lab.queue()
    for tenant in "aaabbb":
        await lab.submit(tenant=tenant)
    assert [tenants_of(await queue.claim(1))[0] for _ in range(6)] == list("ababab")


async def test_tenants_without_limits_share_one_turn_in_order_of_submission(lab):
    await limit(lab, "a", running=100)
    queue = await lab.queue()
    for tenant in "aaaxyx":
        await lab.submit(tenant=tenant)
    assert tenants_of(await queue.claim(6)) == list("axayax")


async def test_a_tenant_may_have_so_many_jobs_waiting_and_is_told_when_to_come_back(lab):
    await limit(lab, "a", waiting=2)
    for _ in range(2):
        await lab.submit(tenant="a")
    with pytest.raises(QueueFull) as caught:
        await lab.submit(tenant="a")
    assert caught.value.retryable
    assert caught.value.retry_after_s > 0
    assert await lab.submit(tenant="b")
    (job,) = await (await lab.queue()).claim(1)
    assert await lab.submit(tenant="a")
    assert job.request.tenant == "a"


async def test_the_time_to_come_back_in_follows_the_measured_drain_rate(lab):
    await limit(lab, "a", waiting=1)
    drain = lab.keys.tenant("a", "drain")
    waits = []
    await lab.submit(tenant="a")
    for count in (300, 30):  # ends within the last half minute
        now = await lab.server_ms()
        await lab.raw.hset(drain, mapping={"count": count, "at": now, "since": now - 10_000_000})
        with pytest.raises(QueueFull) as caught:
            await lab.submit(tenant="a")
        waits.append(caught.value.retry_after_s)
    assert waits[0] == pytest.approx(0.1, rel=0.3)
    assert waits[1] == pytest.approx(1.0, rel=0.3)


async def test_a_clock_that_was_set_back_makes_no_drain_rate_larger(lab):
    await limit(lab, "a", waiting=1)
    await lab.submit(tenant="a")
    now = await lab.server_ms()
    before = {"count": 30, "at": now + 3_600_000, "since": now - 10_000_000}
    await lab.raw.hset(lab.keys.tenant("a", "drain"), mapping=before)
    with pytest.raises(QueueFull) as caught:
        await lab.submit(tenant="a")
    assert caught.value.retry_after_s == pytest.approx(1.0, rel=0.3)


async def test_every_end_of_a_job_is_counted_in_the_drain_rate(lab):
    await limit(lab, "a", running=9)
    queue, client = await lab.queue(), lab.client()
    finished, cancelled = [await lab.submit(tenant="a") for _ in range(2)]
    await client.job(cancelled).cancel()
    (job,) = await queue.claim(1)
    assert job.id == finished
    await queue.finish(job, [], RESULT)
    counted = float(await lab.raw.hget(lab.keys.tenant("a", "drain"), "count"))
    assert 1.2 < counted <= 2.0  # an end counts less the longer it is ago: a slow machine's first


async def test_of_many_jobs_those_that_fit_are_accepted_and_named(lab):
    await limit(lab, "a", waiting=3)
    client = lab.client(tenant="a")
    asked = [
        {"model": "m", "prompt": f"{n}", "priority": ("batch", "default")[n % 2]} for n in range(6)
    ]
    with pytest.raises(QueueFull, match="3 of 6") as caught:
        await client.submit_many(asked)
    ids = caught.value.job_ids
    assert sum(job_id is not None for job_id in ids) == 3
    claimed = {job.id: job.request.prompt for job in await (await lab.queue()).claim(9)}
    assert claimed == {id: f"{n}" for n, id in enumerate(ids) if id is not None}


async def test_a_job_known_by_its_idempotency_key_is_never_refused(lab):
    await limit(lab, "a", waiting=1)
    first = await lab.submit(tenant="a", idempotency_key="k")
    assert await lab.submit(tenant="a", idempotency_key="k") == first


async def test_an_idle_worker_is_woken_when_a_tenant_may_run_one_more(lab, rung):
    await limit(lab, "a", running=1)
    queue, idle = await lab.queue("w1"), await lab.queue("w2")
    ids = [await lab.submit(tenant="a") for _ in range(2)]
    (job,) = await queue.claim(1)
    assert await idle.claim(1) == []
    waiting = asyncio.create_task(rung(idle))
    await asyncio.sleep(0)
    await queue.finish(job, [], RESULT)
    await waiting
    assert [job.id for job in await idle.claim(1)] == ids[1:]


async def test_an_idle_worker_is_woken_by_the_job_of_a_tenant_with_limits(lab, rung):
    await limit(lab, "a", running=1)
    queue = await lab.queue()
    assert await queue.claim(1) == []
    waiting = asyncio.create_task(rung(queue))
    await asyncio.sleep(0)
    await lab.submit(tenant="a")
    await waiting
    assert len(await queue.claim(1)) == 1


async def test_a_tenants_released_job_is_before_its_others(lab):
    await limit(lab, "a", running=1)
    queue = await lab.queue()
    ids = [await lab.submit(tenant="a") for _ in range(3)]
    (job,) = await queue.claim(3)
    await queue.emit([lab.emission(job, 0, lab.token(0))])
    await queue.release([job], "test")
    (again,) = await queue.claim(3)
    assert (again.id, again.offset) == (ids[0], 1)


async def test_the_backlog_of_a_tenant_is_waiting_for_everyone_who_asks(lab):
    await limit(lab, "a", running=1)
    queue = await lab.queue()
    for _ in range(3):
        await lab.submit(tenant="a", priority="batch")
    await queue.claim(1)
    assert (await queue.backlog())["batch"] == 2


async def test_a_cancelled_job_leaves_its_tenants_backlog_at_once(lab):
    await limit(lab, "a", running=0, waiting=1)
    job_id = await lab.submit(tenant="a")
    await lab.client().job(job_id).cancel()
    assert await lab.raw.zcard(lab.keys.tenant_backlog("a", "m", "default")) == 0
    assert await lab.submit(tenant="a")


@pytest.mark.parametrize(
    "way",
    [
        *("finish", "fail for good", "fail and wait", "dead letter", "release", "phantom"),
        *("lease over", "cancel", "deadline"),
    ],
)
async def test_a_reservation_comes_back_however_its_job_leaves(lab, way):
    await limit(lab, "a", running=1)
    failures = 0 if way == "dead letter" else 3
    queue, other = await lab.queue(max_failures=failures), await lab.queue("w2")
    await lab.submit(tenant="a", deadline_s=60)
    (job,) = await queue.claim(1)
    assert await members(lab, "a", "running") == {job.id}
    if way == "finish":
        await queue.finish(job, [], RESULT)
    elif way in ("fail for good", "fail and wait", "dead letter"):
        await queue.fail(job, "c", "m", retryable=way != "fail for good")
    elif way == "release":
        await queue.release([job], "test")
    elif way == "phantom":
        await queue.release_phantoms([])
    elif way == "lease over":
        await lab.expire_lease(job)
        await other.reclaim()
    else:
        if way == "cancel":
            await lab.client().job(job.id).cancel()
        else:
            await lab.raw.hset(lab.keys.job(job.id), "deadline", 1)
        await queue.finish(job, [], None, state="cancelled")
    assert await members(lab, "a", "running") == set()
    waits = (await lab.state(job.id)) == "waiting"
    assert await members(lab, "a", "waiting") == ({job.id} if waits else set())
    await lab.submit(tenant="a")
    assert len(await other.claim(9)) == 1
