"""How limits of tenants come and go, and what is found again when a part of them is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnavailable, InvalidJob, QueueFull
from tokenfleet.producer.keys import PRIORITIES
from tokenfleet.producer.protocol import Choice, JobResult
from tokenfleet.worker.rights import operator_rules
from tokenfleet.worker.rules import EVERY_OTHER, Rules, TenantLimits

RESULT = JobResult(choices=(Choice(text="a", token_ids=(1,), finish_reason="length"),))


async def limit(lab: Any, tenant: str, running: int | None = None, waiting: int | None = None):
    await Rules(lab.connection).set_limits(TenantLimits(tenant, running, waiting))


async def members(lab: Any, tenant: str, state: str) -> set[str]:
    return {i.decode() for i in await lab.raw.smembers(lab.keys.tenant(tenant, state))}


def tenants_of(jobs: list[Any]) -> list[str]:
    return [job.request.tenant for job in jobs]


async def test_limits_hold_for_the_jobs_that_were_there_before(lab):
    queue = await lab.queue()
    ids = [await lab.submit(tenant="a") for _ in range(6)]
    await lab.submit(tenant="a", delay_s=3600)
    running = await queue.claim(2)
    await limit(lab, "a", running=3, waiting=5)
    assert await members(lab, "a", "running") == {job.id for job in running}
    with pytest.raises(QueueFull):
        await lab.submit(tenant="a")
    assert [job.id for job in await queue.claim(9)] == ids[2:3]
    assert await queue.claim(9) == []
    await queue.finish(running[0], [], RESULT)
    assert [job.id for job in await queue.claim(9)] == ids[3:4]


async def test_without_limits_again_everything_that_waited_at_them_runs(lab, rung):
    queue, rules = await lab.queue(), Rules(lab.connection)
    await limit(lab, "a", running=1)
    ids = [await lab.submit(tenant="a") for _ in range(4)]
    assert len(await queue.claim(9)) == 1
    assert await queue.claim(9) == []
    waiting = asyncio.create_task(rung(queue))
    await rules.remove_limits("a")
    await waiting
    assert [job.id for job in await queue.claim(9)] == ids[1:]
    left = await lab.raw.keys(f"{lab.keys.prefix}:tenant:*")
    assert left == []


async def test_common_limits_are_those_of_every_tenant_without_its_own(lab):
    await limit(lab, EVERY_OTHER, running=1)
    await limit(lab, "a", running=2)
    queue = await lab.queue()
    for tenant in "aaabbb":
        await lab.submit(tenant=tenant)
    assert sorted(tenants_of(await queue.claim(9))) == ["a", "a", "b"]
    await Rules(lab.connection).remove_limits(EVERY_OTHER)
    assert tenants_of(await queue.claim(9)) == ["b", "b"]


@pytest.mark.parametrize("lost", ["turns", "parked", "backlog"])
async def test_a_job_whose_place_in_the_line_was_lost_is_found_by_the_repair(lab, lost):
    await limit(lab, "a", running=1)
    queue = await lab.queue()
    ids = [await lab.submit(tenant="a") for _ in range(2)]
    (job,) = await queue.claim(1)
    await queue.claim(1)
    key = {
        "turns": f"{lab.keys.prefix}:turns:m:default",
        "parked": lab.keys.tenant("a", "parked"),
        "backlog": lab.keys.tenant_backlog("a", "m", "default"),
    }[lost]
    await lab.raw.delete(key)
    await queue.finish(job, [], RESULT)
    await queue.repair()
    assert [job.id for job in await queue.claim(9)] == ids[1:]


async def test_a_running_job_whose_keys_were_lost_gives_its_place_back(lab):
    await limit(lab, "a", running=1)
    queue = await lab.queue()
    ids = [await lab.submit(tenant="a") for _ in range(2)]
    (job,) = await queue.claim(1)
    await lab.raw.delete(lab.keys.job(job.id))
    await queue.repair()
    assert [job.id for job in await queue.claim(1)] == ids[1:]


@pytest.mark.parametrize(
    "wrong", [TenantLimits("a b"), TenantLimits("a", running=-1), TenantLimits("a", waiting=1.5)]
)
async def test_limits_that_make_no_sense_are_refused(lab, wrong):
    with pytest.raises(InvalidJob):
        await Rules(lab.connection).set_limits(wrong)


async def test_limits_are_shared_out_among_partitions_and_add_up(valkey_lab):
    rules = Rules(valkey_lab.connection, range(4))
    await rules.set_limits(TenantLimits("a", running=10, waiting=2))
    shares = [
        (await valkey_lab.raw.hget(valkey_lab.connection.keys(p).limits, "a")).decode()
        for p in range(4)
    ]
    assert shares == ["3 1", "3 1", "2 1", "2 1"]
    assert await rules.limits() == [TenantLimits("a", running=10, waiting=4)]


async def test_without_limits_no_key_of_a_tenant_is_made(lab):
    queue = await lab.queue()
    for _ in range(3):
        await lab.submit()
    for job in await queue.claim(3):
        await queue.finish(job, [], RESULT)
    kinds = {
        key.split(b"}:")[1].split(b":")[0] for key in await lab.raw.keys(f"{lab.keys.prefix}*")
    }
    assert kinds == {b"q", b"j", b"e"}


async def test_an_operator_may_set_the_rules_of_its_namespace(lab):
    rights = operator_rules(lab.namespace)
    await lab.raw.execute_command("ACL", "SETUSER", "op", "reset", "on", ">pw", *rights)
    connection = Connection(lab.server.url.replace("//", "//op:pw@"), namespace=lab.namespace)
    rules = Rules(connection)
    for tenant in ("a", EVERY_OTHER):
        await lab.submit(tenant=tenant.replace("*", "b"))
        await rules.set_limits(TenantLimits(tenant, running=0))
    assert await (await lab.queue()).claim(9) == []
    for tenant in ("a", EVERY_OTHER):
        await rules.remove_limits(tenant)
    await rules.pause("m")
    assert await rules.paused() == {("m", priority) for priority in PRIORITIES}
    await rules.resume("m")
    assert len(await (await lab.queue()).claim(9)) == 2
    await connection.aclose()


async def test_jobs_that_were_there_before_the_limits_keep_their_order(lab):
    queue, client = await lab.queue(), lab.client(tenant="a")
    jobs = await client.submit_many([{"model": "m", "prompt": "x"}] * 40)
    await limit(lab, "a", running=2)
    claimed = []
    while found := await queue.claim(9):
        claimed += [job.id for job in found]
        for job in found:
            await queue.finish(job, [], RESULT)
    assert claimed == [job.id for job in jobs]


async def test_a_redis_that_goes_away_while_tenants_are_looked_for_is_out_of_reach(
    valkey_lab, monkeypatch
):
    def gone(**_: Any) -> Any:
        raise ConnectionError("Connection reset by peer")

    monkeypatch.setattr(valkey_lab.connection.client, "scan_iter", gone)
    with pytest.raises(BrokerUnavailable, match="reset by peer"):
        await limit(valkey_lab, "a", running=1)
