"""Somebody else's value at a name of ours: named, left alone, and in nobody else's way."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from tokenfleet.producer.errors import KeyOccupied
from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.keys import PRIORITIES, Keys
from tokenfleet.producer.kinds import kind_of
from tokenfleet.producer.protocol import Choice, JobResult
from tokenfleet.worker import taker
from tokenfleet.worker.commands.doctor import BAD, GOOD, Doctor

RESULT = JobResult(choices=(Choice(text="a", token_ids=(1,), finish_reason="length"),))

OF_A_CLASS: dict[str, Callable[[Keys], str]] = {
    "queue": lambda keys: keys.queue("m", "default"),
    "front": lambda keys: keys.front("m", "default"),
    "turns": lambda keys: f"{keys.prefix}:turns:m:default",
    "backlogs": lambda keys: keys.backlogs("m", "default"),
    "delay": lambda keys: keys.delay,
    "bell": lambda keys: keys.bell("m"),
}
"""Keys at which a foreign value may stop one class, or what comes due, and no other."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a claim logged: event and key."""
    events: list[tuple[str, str]] = []

    class Log:
        def warning(self, event: str, *, key: str, problem: str) -> None:
            assert key in problem
            events.append((event, key))

        def info(self, event: str, *, key: str) -> None:
            events.append((event, key))

    monkeypatch.setattr(taker, "log", Log())
    return events


@pytest.mark.parametrize("place", ["queue", "live", "deadline"])
async def test_a_submission_names_the_key_and_leaves_no_half_of_a_job(lab, place):
    keys = lab.keys
    key = {"queue": keys.queue("m", "default"), "live": keys.live("m"), "deadline": keys.deadline}
    await lab.raw.set(key[place], "somebody's")
    asked = {"prompt": "x", "deadline_s": 60.0, "idempotency_key": "k"}
    with pytest.raises(KeyOccupied, match="holds a string") as caught:
        await lab.client().submit(model="m", **asked)
    assert caught.value.key == key[place]
    assert not caught.value.retryable
    assert await lab.raw.keys(f"{keys.prefix}:j:*") == []
    assert await lab.raw.exists(keys.idempotency("default", "k")) == 0
    await lab.raw.delete(key[place])
    job = await lab.client().submit(model="m", **asked)
    queue = await lab.queue()
    assert [one.id for one in await queue.claim(9)] == [job.id]


async def test_other_classes_and_models_are_submitted_to_all_the_same(lab):
    await lab.raw.rpush(lab.keys.queue("m", "default"), "somebody's")
    await lab.submit(priority="batch")
    await lab.submit(model="other")
    with pytest.raises(KeyOccupied, match="holds a list"):
        await lab.submit()


@pytest.mark.parametrize("place", OF_A_CLASS)
async def test_a_worker_serves_the_other_classes_and_says_once_which_key_is_not_ours(
    lab, said, place
):
    key = OF_A_CLASS[place](lab.keys)
    queue = await lab.queue()
    await lab.raw.delete(key)
    await lab.raw.set(key, "somebody's")
    for _ in range(3):
        ids = [await lab.submit(priority=p) for p in PRIORITIES if p != "default"]
        assert [job.id for job in await queue.claim(9)] == ids
    met = [] if place in ("bell", "backlogs") else [("key_occupied", key)]  # those are not read
    assert said == met
    assert await queue.wait(0.01) is False
    await lab.raw.delete(key)
    job_id = await lab.submit()
    assert [job.id for job in await queue.claim(9)] == [job_id]
    assert said[len(met) :] == [("key_free_again", key)] * len(met)


async def test_an_idle_worker_is_woken_beside_a_queue_that_is_not_ours(lab, said, rung):
    queue = await lab.queue()
    await lab.raw.delete(lab.keys.queue("m", "default"))
    await lab.raw.set(lab.keys.queue("m", "default"), "somebody's")
    assert await queue.claim(1) == []
    assert await queue.wait(0.01) is False
    await lab.submit(priority="batch")
    await rung(queue)
    assert len(await queue.claim(1)) == 1


async def test_a_worker_starts_beside_a_queue_that_is_not_ours_and_says_so(lab):
    await lab.raw.set(lab.keys.queue("m", "batch"), "somebody's")
    queue = await lab.queue()
    (problem,) = await queue.ensure()
    assert lab.keys.queue("m", "batch") in problem
    assert (await queue.backlog())["batch"] == 0
    await queue.leave()


async def test_jobs_of_a_queue_that_was_overwritten_lose_nothing(lab, said):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    await lab.submit()
    (running,) = await queue.claim(1)
    waiting = await lab.submit()
    await lab.raw.delete(running.stream)
    await lab.raw.set(running.stream, "somebody's")
    await queue.emit([lab.emission(running, 0, lab.token(0))])
    assert await queue.renew([running]) == frozenset()
    assert await other.reclaim() == 0
    assert [job.id for job in await other.claim(9)] == [waiting]
    assert await queue.finish(running, [], RESULT)
    assert await lab.state(running.id) == "finished"
    assert await lab.raw.get(running.stream) == b"somebody's"


async def test_the_job_of_a_dead_worker_moves_on_though_its_queue_was_overwritten(lab, said):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    await lab.submit()
    (running,) = await queue.claim(1)
    await lab.raw.delete(running.stream)
    await lab.raw.set(running.stream, "somebody's")
    await other.reclaim()
    assert await other.claim(1) == []  # it goes to its owner, whose lease begins anew
    fields = await lab.fields(running.id)
    assert fields["stream"] == lab.keys.front("m", "default")
    await lab.raw.xclaim(fields["stream"], "workers", "w1", 0, [fields["entry"]], idle=10**8)
    assert await other.reclaim() == 1
    assert [job.attempt for job in await other.claim(1)] == [2]


async def test_a_job_comes_back_to_its_class_though_the_front_of_it_is_not_ours(lab, said):
    queue = await lab.queue()
    await lab.submit()
    (job,) = await queue.claim(1)
    await lab.raw.delete(lab.keys.front("m", "default"))
    await lab.raw.set(lab.keys.front("m", "default"), "somebody's")
    assert await queue.release([job], "test") == {job.id}
    assert await queue.claim(1) == []  # the class is looked at from its front
    await lab.raw.delete(lab.keys.front("m", "default"))
    assert [one.attempt for one in await queue.claim(1)] == [2]


async def test_leases_of_other_classes_end_beside_a_queue_that_is_not_ours(lab):
    queue, other = await lab.queue("w1"), await lab.queue("w2")
    await lab.submit(priority="batch")
    (job,) = await queue.claim(1)
    for name in (lab.keys.queue, lab.keys.front):
        await lab.raw.delete(name("m", "interactive"))
        await lab.raw.set(name("m", "interactive"), "somebody's")
    await lab.expire_lease(job)
    assert await other.reclaim() == 1


async def test_a_job_whose_hash_was_overwritten_is_dropped_and_the_next_one_runs(lab, said):
    queue = await lab.queue()
    broken, whole = await lab.submit(), await lab.submit()
    await lab.raw.set(lab.keys.job(broken), "somebody's")
    assert [job.id for job in await queue.claim(9)] == [whole]
    assert said == [("key_occupied", lab.keys.job(broken))]
    assert await queue.reclaim() == 0
    assert await lab.entries() == 1


async def test_a_call_about_one_key_names_it(lab):
    await lab.raw.set(lab.keys.dead, "somebody's")
    with pytest.raises(KeyOccupied, match="dead holds a string") as caught:
        await lab.connection.execute("ZCARD", lab.keys.dead)
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  # our own
    assert (copy.key, str(copy)) == (lab.keys.dead, str(caught.value))


async def test_the_doctor_names_every_key_that_is_not_ours_and_the_fleet_is_seen_all_the_same(lab):
    queue = await lab.queue()
    await queue.heartbeat({"slots": 4})
    await lab.submit(priority="batch", idempotency_key="k", deadline_s=60)
    checks = [f for f in await Doctor(lab.connection).examine() if f.check == "keys"]
    assert [finding.level for finding in checks] == [GOOD]
    for key in (lab.keys.queue("m", "default"), lab.keys.paused):
        await lab.raw.delete(key)
        await lab.raw.rpush(key, "somebody's")
    checks = [f for f in await Doctor(lab.connection).examine() if f.check == "keys"]
    assert [finding.level for finding in checks] == [BAD, BAD]
    assert lab.keys.paused in checks[0].found
    assert lab.keys.queue("m", "default") in checks[1].found
    await lab.raw.delete(lab.keys.paused)
    queues = (await FleetReader(lab.connection).status()).queues
    depths = {depth.priority: depth.waiting for depth in queues}
    assert depths == {"interactive": 0, "default": 0, "batch": 1}


async def test_every_key_that_a_life_leaves_has_the_type_that_is_said_to_belong_there(lab):
    queue = await lab.queue()
    await queue.heartbeat({"slots": 4})
    await lab.raw.hset(lab.keys.limits, "acme", "1 9")
    for n in range(3):
        await lab.submit(tenant="acme", idempotency_key=f"k{n}", deadline_s=60)
    await lab.submit(delay_s=60)
    await lab.submit(max_failures=0)
    jobs = await queue.claim(9)
    await lab.raw.sadd(lab.keys.paused, "m:batch")
    for job in jobs:
        await queue.emit([lab.emission(job, 0, lab.token(0))])
        await queue.fail(job, "engine_died", "it did", retryable=job.request.tenant != "acme")
    await queue.claim(1)
    kinds = set()
    for key in await lab.raw.keys(f"{lab.keys.prefix}:*"):
        assert (await lab.raw.type(key)).decode() == kind_of(key.decode()), key
        kinds.add(key.decode().split("}:")[1].split(":")[0])
    assert kinds >= {"q", "j", "e", "idem", "delay", "deadline", "live", "dead", "limits", "tenant"}
    assert kinds >= {"backlogs", "paused", "workers", "worker", "bell"}
