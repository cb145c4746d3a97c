"""Claims over several partitions: all of them at once, urgency across them, one of them away."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.keys import PRIORITIES, new_job_id, partition_of
from tokenfleet.producer.protocol import JobRequest
from tokenfleet.worker import partitions, taker
from tokenfleet.worker.broker import Broker
from tokenfleet.worker.lease import LeaseKeeper
from tokenfleet.worker.partitions import PartitionSilent, allot
from tokenfleet.worker.priorities import Offer
from tokenfleet.worker.queue import JobQueue
from tokenfleet.worker.rules import EVERY_OTHER, Rules, TenantLimits

PARTITIONS = 4


@pytest.fixture
async def spread(valkey_lab: Any) -> AsyncIterator[JobQueue]:
    """A worker's queue over several partitions of one server."""
    queue = JobQueue(
        valkey_lab.server.url, namespace=valkey_lab.namespace, worker_id="w1", model_name="m",
        partitions=PARTITIONS,
    )  # fmt: skip
    await queue.ensure()
    yield queue
    await queue.aclose()


async def put(lab: Any, partition: int, priority: str = "default", **more: Any) -> str:
    """A job in a partition of our choice."""
    request = JobRequest(model="m", prompt="x", priority=priority, **more)
    draft = lab.submission.draft(request, job_id=new_job_id(partition))
    return (await lab.submission.send([draft]))[0].id


def cut_off(queue: JobQueue, partition: int) -> asyncio.Event:
    """Let one partition's server be away; set it to end that."""
    run, back = queue.connection.run, asyncio.Event()

    async def cut(script: Any, at: int, *rest: Any, **more: Any) -> Any:
        if at == partition and not back.is_set():
            raise BrokerUnavailable("this part of the cluster is away")
        return await run(script, at, *rest, **more)

    queue.connection.run = cut
    return back


waiting = st.dictionaries(
    st.integers(0, 15),
    st.fixed_dictionaries(dict.fromkeys(PRIORITIES, st.integers(0, 9))),
    min_size=1,
)


@settings(max_examples=60, deadline=None)
@given(waiting=waiting, count=st.integers(1, 40), owed=st.integers(0, 3))
def test_what_is_allotted_is_all_that_may_be_in_the_order_of_urgency(waiting, count, owed):
    offers = [Offer("batch", owed)] + [Offer(priority, count) for priority in PRIORITIES]
    shares = allot(offers, waiting, count)
    given_out = Counter[str]()
    for partition, share in shares.items():
        assert all(0 < n <= waiting[partition][priority] for priority, n in share.items())
        given_out.update(share)
    there = Counter[str]()
    for classes in waiting.values():
        there.update(classes)
    assert given_out.total() == min(count, there.total())
    for more, less in pairwise(PRIORITIES):
        if given_out[more] < there[more]:  # the more urgent ones were not all taken
            assert given_out[less] <= (owed if less == "batch" else 0)
    for priority in PRIORITIES:  # and partitions take turns
        counts = [share.get(priority, 0) for share in shares.values()]
        short = [p for p in waiting if shares.get(p, {}).get(priority, 0) < waiting[p][priority]]
        assert all(max(counts) - shares.get(p, {}).get(priority, 0) <= 1 + owed for p in short)


async def test_an_urgent_job_of_any_partition_goes_before_a_batch_job_of_another(
    valkey_lab, spread
):
    ids = [await put(valkey_lab, p, "batch") for p in range(PARTITIONS) for _ in range(2)]
    urgent = [await put(valkey_lab, p, "interactive") for p in (3, 1, 2)]
    for _ in range(3):  # whichever partition comes first
        (job,) = await spread.claim(1)
        assert job.priority == "interactive"
        urgent.remove(job.id)
    assert sorted(job.id for job in await spread.claim(20)) == sorted(ids)


async def test_a_claim_takes_no_more_than_it_asks_for_over_all_partitions(valkey_lab, spread):
    ids = {await put(valkey_lab, p) for p in range(PARTITIONS) for _ in range(5)}
    found = []
    for count in (1, 3, 7):
        jobs = await spread.claim(count)
        assert len(jobs) == count
        found += jobs
    assert not spread.cut_short
    by_partition = Counter(partition_of(job.id) for job in found)
    assert max(by_partition.values()) - min(by_partition.values()) <= 1
    found += await spread.claim(100)
    assert {job.id for job in found} == ids
    assert len(found) == len(ids)


async def test_a_claim_goes_on_where_more_waits_than_one_call_takes(
    valkey_lab, spread, monkeypatch
):
    monkeypatch.setattr(taker, "MOST_PER_CLAIM", 4)
    ids = [await put(valkey_lab, 1) for _ in range(9)]
    assert [job.id for job in await spread.claim(20)] == ids


async def test_tenants_of_whom_nothing_waits_any_more_hide_nobody_behind_them(valkey_lab, spread):
    """More of them than one look reads stand first in line: their jobs were cancelled."""
    lab, canceller = valkey_lab, valkey_lab.client()
    await Rules(spread.connection).set_limits(TenantLimits(EVERY_OTHER, running=40))
    for number in range(130):
        job_id = await put(lab, 1, tenant=f"t{number}")
        await canceller.job(job_id).cancel()
    ids = [await put(lab, 1, tenant=name) for name in ("last", "later")]
    assert [job.id for job in await spread.claim(9)] == ids
    line = spread.connection.keys(1).prefix + ":turns:m:default"
    assert await lab.raw.zcard(line) <= 1, "the queue itself"


async def test_a_claim_asks_all_partitions_at_once(valkey_lab, spread):
    """Each look is held back until all have been asked; one after the other they would never be."""
    run, asked, all_asked = spread.connection.run, set(), asyncio.Event()

    async def held(script: Any, partition: int, *rest: Any, **more: Any) -> Any:
        asked.add((script.name, partition))
        if len(asked) >= PARTITIONS:
            all_asked.set()
        await all_asked.wait()
        return await run(script, partition, *rest, **more)

    spread.connection.run = held
    job_id = await put(valkey_lab, 2)
    assert [job.id for job in await spread.claim(8)] == [job_id]
    assert asked == {("claim", 2), *(("peek", p) for p in range(PARTITIONS))}


async def test_a_job_that_another_worker_took_in_between_is_made_up_for(valkey_lab, spread):
    """What was seen and is gone leaves its slot to what waits elsewhere."""
    other = await valkey_lab.queue("w2")  # of one partition: the first
    first = [await put(valkey_lab, 0, "interactive"), *[await put(valkey_lab, 1) for _ in range(3)]]
    run = spread.connection.run

    async def late(script: Any, partition: int, *rest: Any, **more: Any) -> Any:
        if script.name == "claim" and partition == 0:
            assert len(await other.claim(9)) == 1
        return await run(script, partition, *rest, **more)

    spread.connection.run = late
    assert {job.id for job in await spread.claim(2)} <= set(first[1:])
    spread.connection.run = run
    assert len(await spread.claim(9)) == 1


async def test_a_worker_waits_on_all_partitions_and_is_woken_by_each(valkey_lab, spread, rung):
    for partition in range(PARTITIONS):
        assert await spread.claim(3) == []
        ring = asyncio.create_task(rung(spread))
        await asyncio.sleep(0)
        await put(valkey_lab, partition)
        await ring
        assert len(await spread.claim(3)) == 1


async def test_a_job_that_comes_due_in_any_partition_is_claimed_then(valkey_lab, spread):
    delay_s = 0.05
    job_id = await put(valkey_lab, 3, delay_s=delay_s)
    while await spread.claim(1):  # a slow machine needs a later moment for it not to be due yet
        delay_s *= 2
        job_id = await put(valkey_lab, 3, delay_s=delay_s)
    assert await spread.wait(100) is False  # the time was over: the job is due
    assert [job.id for job in await spread.claim(1)] == [job_id]


async def test_a_claim_does_not_wait_behind_stale_entries_of_one_partition(
    valkey_lab, spread, rung
):
    async with valkey_lab.raw.pipeline(transaction=False) as entries:
        for number in range(2001):
            key = spread.connection.keys(1).queue("m", "default")
            entries.xadd(key, {"j": f"gone{number}"})
        await entries.execute()
    job_id = await put(valkey_lab, 1)
    while not (claimed := await spread.claim(2)):
        await rung(spread)
    assert [job.id for job in claimed] == [job_id]


async def test_a_destroyed_group_is_made_again_and_its_jobs_are_found(valkey_lab, spread):
    ids = [await put(valkey_lab, 2) for _ in range(3)]
    await valkey_lab.raw.xgroup_destroy(spread.connection.keys(2).queue("m", "default"), "workers")
    await valkey_lab.raw.delete(spread.connection.keys(3).queue("m", "batch"))
    assert sorted(job.id for job in await spread.claim(5)) == sorted(ids)
    assert await valkey_lab.raw.xinfo_groups(spread.connection.keys(3).queue("m", "batch"))


async def test_a_part_of_a_cluster_that_is_away_keeps_nobody_from_the_others(valkey_lab, spread):
    ids = [await put(valkey_lab, p) for p in range(PARTITIONS)]
    back = cut_off(spread, 0)
    assert {job.id for job in await spread.claim(9)} == set(ids[1:])
    assert not spread.cut_short, "a look takes nothing"
    with pytest.raises(BrokerUnavailable):
        await spread.claim(9)
    back.set()
    assert [job.id for job in await spread.claim(9)] == ids[:1]


async def test_a_part_of_a_cluster_that_says_nothing_keeps_nobody_from_the_others(
    valkey_lab, spread, monkeypatch
):
    ids = [await put(valkey_lab, p) for p in range(PARTITIONS)]
    run = spread.connection.run

    async def hangs(script: Any, partition: int, *rest: Any, **more: Any) -> Any:
        if partition == 0:
            await asyncio.Event().wait()
        return await run(script, partition, *rest, **more)

    spread.connection.run = hangs
    left = set(ids[1:])
    with monkeypatch.context() as hurried:
        hurried.setattr(partitions, "LOOK_S", 0.05)
        hurried.setattr(partitions, "REST_S", 0.0)
        while left:  # a part that is slow here for another reason comes with the next claim
            with suppress(BrokerUnavailable):
                left -= {job.id for job in await spread.claim(9)}
        with pytest.raises(BrokerUnavailable, match="has not answered"):
            await spread.claim(9)
    spread.connection.run = run
    assert [job.id for job in await spread.claim(9)] == ids[:1]


async def test_a_part_of_a_cluster_that_said_nothing_is_waited_for_once_in_a_while(
    valkey_lab, spread, monkeypatch
):
    ids = [await put(valkey_lab, p) for p in range(PARTITIONS)]
    run, asked, got = spread.connection.run, list[int](), set[str]()

    async def hangs(script: Any, partition: int, *rest: Any, **more: Any) -> Any:
        asked.append(partition)
        if partition == 0:
            await asyncio.Event().wait()
        return await run(script, partition, *rest, **more)

    spread.connection.run = hangs
    with monkeypatch.context() as hurried:
        hurried.setattr(partitions, "LOOK_S", 0.05)
        hurried.setattr(partitions, "REST_S", 3600.0)
        got |= {job.id for job in await spread.claim(9)}
    assert 0 in asked
    asked.clear()
    got |= {job.id for job in await spread.claim(9)}
    with pytest.raises(PartitionSilent, match="not asked again yet"):
        await spread.release_phantoms(got)
    assert 0 not in asked
    now = time.monotonic()
    monkeypatch.setattr(spread._taker._silences, "_clock", lambda: now + 7200)
    spread.connection.run = run
    got |= {job.id for job in await spread.claim(9)}
    assert got == {*ids}
    assert await spread.release_phantoms(got) == frozenset()


async def test_the_search_for_phantoms_waits_for_no_silent_part_either(spread, monkeypatch):
    run, asked = spread.connection.run, []

    async def hangs(script: Any, partition: int, *rest: Any, **more: Any) -> Any:
        if partition == 0:
            await asyncio.Event().wait()
        asked.append(partition)
        return await run(script, partition, *rest, **more)

    spread.connection.run = hangs
    monkeypatch.setattr(partitions, "LOOK_S", 0.05)
    with pytest.raises(PartitionSilent, match="has not answered"):
        await spread.release_phantoms([])
    assert sorted(asked) == list(range(1, PARTITIONS))


async def test_a_claim_without_a_reply_in_one_partition_brings_the_jobs_of_the_others(
    valkey_lab, spread
):
    ids = [await put(valkey_lab, p) for p in range(PARTITIONS)]
    run = spread.connection.run

    async def lost(script: Any, partition: int, *rest: Any, **more: Any) -> Any:
        reply = await run(script, partition, *rest, **more)
        if script.name == "claim" and partition == 1:
            raise BrokerUnavailable("the reply was lost")
        return reply

    spread.connection.run = lost
    jobs = await spread.claim(9)
    assert {job.id for job in jobs} == {*ids} - {ids[1]}
    assert spread.cut_short
    assert await spread.release_phantoms([job.id for job in jobs]) == {ids[1]}


async def test_the_floor_of_a_class_holds_over_partitions(valkey_lab, spread):
    for n in range(120):
        await put(valkey_lab, n % PARTITIONS, "interactive")
        await put(valkey_lab, n % PARTITIONS, "batch")
    got = [job for _ in range(40) for job in await spread.claim(2)]
    batch = [job for job in got if job.priority == "batch"]
    assert len(batch) >= 0.05 * len(got) - 1
    assert all(job.by_right for job in batch)


class Lost:
    """Whom a lease keeper tells."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def lost(self, job: Any, reason: str) -> None:
        self.told.append(job.id)

    fenced: Any = None


async def test_leases_go_on_in_the_partitions_that_are_there(valkey_lab, spread):
    now, owner = 1000.0, Lost()
    for partition in range(PARTITIONS):
        await put(valkey_lab, partition)
    jobs = [_Held(one, now + 10) for one in await spread.claim(9)]
    back = cut_off(spread, 2)
    keeper = LeaseKeeper(
        spread, Broker(), jobs, owner, lease_s=30.0, healthy=lambda: True, clock=lambda: now
    )
    assert await keeper.renew() is False
    until = {partition_of(job.id): job.lease_until - now for job in jobs}
    assert until == {0: 30.0, 1: 30.0, 2: 10.0, 3: 30.0}
    back.set()
    assert await keeper.renew() is True
    assert {job.lease_until - now for job in jobs} == {30.0}
    assert owner.told == []


async def test_a_renewal_of_an_attempt_that_redis_forgot_says_nothing_of_the_next_one(
    valkey_lab, spread
):
    owner, renew = Lost(), spread.renew
    owner.fenced = lambda job: owner.told.append(job.id)
    await put(valkey_lab, 0)
    (job,) = [_Held(one, 1010.0) for one in await spread.claim(1)]
    again = replace(job.claimed, attempt=2)

    async def forgotten(jobs: Any) -> frozenset[str]:
        found = await renew([replace(one, attempt=7) for one in jobs])
        job.claimed = again  # adopted while the reply was on its way
        return found

    spread.renew = forgotten
    keeper = LeaseKeeper(
        spread, Broker(), [job], owner, lease_s=30.0, healthy=lambda: True, clock=lambda: 1000.0
    )
    assert await keeper.renew() is True
    assert (owner.told, job.lease_until) == ([], 1010.0)


class _Held:
    """A job as far as its lease is concerned."""

    ending = None

    def __init__(self, claimed: Any, lease_until: float) -> None:
        self.claimed, self.lease_until = claimed, lease_until
        self.id = claimed.id
