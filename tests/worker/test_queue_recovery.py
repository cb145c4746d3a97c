"""What is lost with a stream, a group, the script cache or the server, and how it comes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.keys import GROUP
from tokenfleet.producer.protocol import Choice, Event, JobResult
from tokenfleet.worker.claims import Emission, flat

RESULT = JobResult(choices=(Choice(text="a", token_ids=(1,), finish_reason="length"),))


def one_token(job: Any, offset: int) -> Emission:
    event = Event(offset=offset, token_ids=(offset,), text="a", attempt=job.attempt)
    return job.id, job.attempt, flat([event])


async def three_states(lab: Any, queue: Any) -> tuple[Any, Any, str]:
    """A job that ran to its end, one that runs, one that waits."""
    for _ in range(2):
        await lab.submit()
    done, running = await queue.claim(2)
    assert await queue.finish(done, [], RESULT)
    return done, running, await lab.submit()


async def test_a_destroyed_group_neither_reruns_nor_doubles_nor_loses_a_job(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    done, running, waiting = await three_states(lab, queue)
    await lab.raw.xgroup_destroy(lab.keys.queue("m", "default"), GROUP)
    assert [job.id for job in await other.claim(9)] == [waiting]
    assert await lab.state(done.id) == "finished"
    assert not (await queue.emit([one_token(running, 0)])).fenced
    assert await queue.renew([running]) == frozenset()
    assert await other.reclaim() == 0
    assert await queue.finish(running, [], RESULT)
    assert await lab.entries() == 1


async def test_a_deleted_stream_is_filled_again_from_the_hashes(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    _, running, waiting = await three_states(lab, queue)
    await lab.raw.delete(lab.keys.queue("m", "default"))
    assert await other.claim(9) == []
    assert await other.reclaim() == 0
    assert [job.id for job in await other.claim(9)] == [waiting]
    assert await queue.renew([running]) == frozenset()
    assert await queue.finish(running, [], RESULT)


async def test_one_scan_fills_a_deleted_stream_of_any_length_again(lab):
    queue = await lab.queue("w1")
    ids = [await lab.submit() for _ in range(25)]
    await lab.raw.delete(lab.keys.queue("m", "default"))
    assert await queue.claim(1) == []
    await queue.reclaim(limit=10)  # as many are looked at in one call
    assert {job.id for job in await queue.claim(99)} == {*ids}


async def test_the_lease_of_a_dead_worker_ends_also_after_its_stream_was_deleted(lab):
    queue, other = await lab.queue("dead"), await lab.queue("w2")
    await lab.submit()
    (running,) = await queue.claim(1)
    await lab.raw.delete(running.stream)
    await other.reclaim()
    assert await other.claim(1) == []  # it goes to its owner, whose lease begins anew
    fields = await lab.fields(running.id)
    found = await lab.raw.xpending_range(fields["stream"], GROUP, "-", "+", 9)
    assert [entry["consumer"] for entry in found] == [b"dead"]
    await lab.expire_lease(replace(running, stream=fields["stream"], entry=fields["entry"]))
    assert await other.reclaim() == 1
    assert [job.attempt for job in await other.claim(1)] == [2]


async def test_a_worker_that_renews_after_its_stream_was_deleted_keeps_its_job(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    await lab.submit()
    (running,) = await queue.claim(1)
    await lab.raw.delete(running.stream)
    assert await queue.renew([running]) == frozenset()
    assert await other.claim(9) == []
    assert await other.reclaim() == 0
    assert await queue.finish(running, [], RESULT)
    assert await lab.entries() == 0


async def test_a_repair_walk_leaves_healthy_jobs_alone(lab):
    queue = await lab.queue()
    for _ in range(25):
        await lab.submit()
    await lab.submit(delay_s=3600)
    await queue.claim(5)
    assert [await queue.repair(count=10) for _ in range(4)] == [0, 0, 0, 0]
    assert await lab.entries() == 25


async def test_every_script_survives_a_flushed_script_cache(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    flush = lab.raw.script_flush
    await flush()
    for _ in range(4):
        await lab.submit()
    await flush()
    first, second, third, fourth = await queue.claim(4)
    await flush()
    assert not (await queue.emit([one_token(first, 0)])).fenced
    await flush()
    assert await queue.renew([first]) == frozenset()
    await flush()
    assert await queue.finish(first, [], RESULT)
    await flush()
    assert await queue.release([second], "test") == {second.id}
    await flush()
    assert await queue.fail(third, "c", "m", retryable=True) == "waiting"
    await flush()
    assert await queue.release_phantoms([]) == {fourth.id}
    await flush()
    assert await other.reclaim() == 0
    await flush()
    assert await lab.client().job(second.id).cancel() == "cancelled"
    await flush()
    assert (await lab.client().job(second.id).status()).state == "cancelled"


async def test_nothing_is_lost_when_the_server_dies_and_comes_back_with_its_file(own_lab):
    lab = own_lab
    queue = await lab.queue("w1")
    done, running, waiting = await three_states(lab, queue)
    await queue.emit([one_token(running, 0)])
    lab.server.kill()
    with pytest.raises(BrokerUnavailable):
        await queue.emit([one_token(running, 1)])
    lab.server.start()
    assert not (await queue.emit([one_token(running, 1)])).behind
    assert [event.offset for event in await lab.log(running.id)] == [0, 1]
    assert [job.id for job in await lab.claim_when_back(queue, 9)] == [waiting]
    assert await queue.finish(running, [], RESULT)
    assert await lab.state(done.id) == "finished"


async def test_a_claim_whose_reply_was_lost_is_found_again_as_a_phantom(own_lab):
    lab = own_lab
    queue = await lab.queue("w1")
    await lab.submit()
    assert await queue.claim(1)  # the reply is dropped here
    lab.server.restart()
    assert await lab.claim_when_back(queue, 1) == []
    assert len(await queue.release_phantoms([])) == 1
    (job,) = await queue.claim(1)
    assert (job.attempt, job.failures) == (2, 0)


async def test_a_claim_is_never_repeated_by_the_client(own_lab, monkeypatch):
    monkeypatch.setattr("tokenfleet.producer.connection.SOCKET_TIMEOUT_S", 1.0)
    lab = own_lab
    queue = await lab.queue("w1")
    await lab.submit()
    lab.server.pause()
    claim = asyncio.create_task(queue.claim(1))
    with pytest.raises(BrokerUnavailable):
        await claim
    lab.server.resume()
    assert len(await queue.release_phantoms([])) <= 1
    (job,) = await lab.claim_when_back(queue, 1)
    assert job.attempt <= 2


async def test_a_forgotten_job_is_adopted_once_with_its_log_under_the_next_attempt(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    job_id = await lab.submit(max_failures=7, deadline_s=60)
    (job,) = await queue.claim(1)
    await queue.emit([one_token(job, 0)])
    await queue.emit([one_token(job, 1)])
    stream = lab.client().job(job_id).stream()
    seen = [await anext(stream), await anext(stream)]
    log = await lab.log(job_id)
    await lab.raw.delete(*await lab.raw.keys(f"{lab.keys.prefix}:*"))
    assert (await queue.emit([one_token(job, 2)])).fenced == {job_id}
    adopted = await queue.adopt(job, flat(log))
    assert (adopted.attempt, adopted.offset) == (2, 2)
    assert await queue.adopt(job, flat(log)) == adopted
    assert await other.adopt(job, flat(log)) is None
    assert await lab.log(job_id) == log
    assert await other.claim(9) == []
    assert await other.reclaim() == 0
    assert (await queue.emit([one_token(job, 2)])).fenced == {job_id}
    assert not (await queue.emit([one_token(adopted, 2)])).fenced
    assert await queue.renew([adopted]) == frozenset()
    assert await queue.finish(adopted, [], RESULT)
    seen += [event async for event in stream]
    assert [event.offset for event in seen] == [0, 1, 2, 3]
    assert await lab.entries() == 0


async def test_an_adopted_job_goes_on_elsewhere_when_its_worker_dies(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    await lab.submit()
    (job,) = await queue.claim(1)
    await lab.raw.delete(*await lab.raw.keys(f"{lab.keys.prefix}:*"))
    adopted = await queue.adopt(job, [])
    fields = await lab.fields(job.id)
    await lab.expire_lease(replace(adopted, entry=fields["entry"]))
    assert await other.reclaim() == 1
    (again,) = await other.claim(1)
    assert (again.id, again.attempt, again.request) == (job.id, 3, job.request)


async def test_an_adopted_job_has_every_field_that_its_claim_knew(lab):
    queue = await lab.queue("w1", uniform=lambda: 0.0)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    job_id = await lab.submit(
        idempotency_key="k", deadline_s=60, max_failures=7, tenant="acme", priority="batch",
        traceparent=parent, on_disconnect="cancel",
    )  # fmt: skip
    (job,) = await queue.claim(1)
    await queue.emit([one_token(job, 0)])
    await queue.fail(job, "engine_died", "it did", retryable=True)
    (job,) = await queue.claim(1)
    await queue.release([job], "preempted", preempted=True)
    (job,) = await queue.claim(1)
    stream = lab.client().job(job_id).stream()
    await anext(stream)
    before, log = await lab.fields(job_id), await lab.log(job_id)
    await lab.raw.delete(*await lab.raw.keys(f"{lab.keys.prefix}:*"))
    adopted = await queue.adopt(job, flat(log))
    after = await lab.fields(job_id)
    changed = {name for name in before.keys() | after if before.get(name) != after.get(name)}
    assert changed == {"attempt", "claimed", "stream", "entry"}
    assert (adopted.failures, adopted.preempted) == (1, 1)
    await stream.aclose()


async def test_a_job_submitted_again_after_its_adoption_is_not_run_twice(lab):
    queue, metadata = await lab.queue("w1"), {"tags": ["a", 1], "of": {"x": 0.5}}
    job_id = await lab.submit(idempotency_key="k", deadline_s=60, metadata=metadata)
    (job,) = await queue.claim(1)
    await lab.raw.delete(*await lab.raw.keys(f"{lab.keys.prefix}:*"))
    adopted = await queue.adopt(job, [])
    assert await lab.submit(idempotency_key="k", deadline_s=60, metadata=metadata) == job_id
    assert await queue.claim(1) == []
    assert await queue.finish(adopted, [], RESULT)
    assert await lab.raw.pttl(lab.keys.idempotency("default", "k")) > 0


async def test_a_job_submitted_again_before_its_adoption_runs_instead_of_the_forgotten_one(
    lab,
):
    queue = await lab.queue("w1")
    await lab.submit(idempotency_key="k")
    (job,) = await queue.claim(1)
    await lab.raw.delete(*await lab.raw.keys(f"{lab.keys.prefix}:*"))
    again = await lab.submit(idempotency_key="k")
    assert await queue.adopt(job, []) is None
    assert await lab.state(job.id) is None
    assert [one.id for one in await queue.claim(9)] == [again]
