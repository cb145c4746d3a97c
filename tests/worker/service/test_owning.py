"""Which jobs a worker takes, keeps and gives up."""

from __future__ import annotations

import asyncio
import math
import os

import pytest
import structlog

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.protocol import JobRequest
from tokenfleet.producer.submission import Submission
from tokenfleet.worker import intake, launcher
from tokenfleet.worker.observing.telemetry import Telemetry
from tokenfleet.worker.queue import JobQueue
from tokenfleet.worker.taker import CLAIM


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_no_more_than_slots_and_prefetch_are_ever_owned(fleet, until, prefetch) -> None:
    worker = fleet.worker(max_num_seqs=3, prefetch=prefetch, worker_id="w")
    jobs = [await fleet.submit(f"job {i}") for i in range(12)]
    most = 3 + prefetch
    for done in range(12):
        given = min(most + done, 12)
        await until(lambda given=given: len(fleet.engine.requests) == given)
        held = await fleet.pending("w")
        assert held <= most
        assert len(worker.roster) <= most
        job = list(fleet.engine.requests)[done]
        fleet.engine.say(job, "x", "stop")
        await until(lambda job=job: fleet.is_(job, "finished"))
    assert sorted(fleet.engine.requests) == sorted(jobs)


async def test_nothing_is_prefetched_while_a_slot_is_free(fleet, until) -> None:
    worker = fleet.worker(max_num_seqs=3, prefetch=2)
    jobs = [await fleet.submit() for _ in range(2)]
    await until(lambda: fleet.has(*jobs))
    assert worker.roster.room() == 1
    third = await fleet.submit()
    await until(lambda: fleet.has(third))
    assert worker.roster.room() == 2


async def test_a_freed_slot_is_given_to_the_next_job_at_once(fleet, until) -> None:
    fleet.worker(max_num_seqs=1)
    first, second = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(first))
    fleet.engine.say(first, "x", "stop")
    await until(lambda: fleet.has(second))


@pytest.mark.parametrize(("tokens", "owned"), [(10, 6), (200, 2)])
async def test_jobs_that_fill_no_step_are_begun_with_those_fetched_behind_them(
    fleet, until, monkeypatch, tokens, owned
) -> None:
    """And the engine waits for nobody once it has a step full of work."""
    monkeypatch.setattr(launcher, "HOLD_S", 60.0)
    seen: list[int] = []

    class Watched(fleet.engine_kind):
        def add(self, request):
            seen.append(len(worker.roster))
            super().add(request)

    fleet.engine_kind = Watched
    jobs = [await fleet.submit(None, prompt_token_ids=[97] * tokens) for _ in range(6)]
    worker = fleet.worker(max_num_seqs=32, max_num_batched_tokens=400)
    await until(lambda: fleet.has(*jobs))
    assert seen[0] == owned


async def test_the_engine_has_a_job_before_its_claim_is_told_of(fleet, until, monkeypatch) -> None:
    given: list[bool] = []
    told = Telemetry.job_claimed

    def watched(self, job, *args):
        given.append(fleet.has(job.id))
        told(self, job, *args)

    monkeypatch.setattr(Telemetry, "job_claimed", watched)
    fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "ok", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert given == [True]


async def test_a_job_waits_for_others_behind_it_only_a_moment(fleet, until, monkeypatch) -> None:
    """Of a claim that does not come back, say."""
    claim, gone = JobQueue.claim, asyncio.Event()
    claims = []

    async def stuck(self, count):
        claims.append(count)
        if len(claims) > 1:
            await gone.wait()
        return await claim(self, count)

    jobs = [await fleet.submit() for _ in range(5)]
    monkeypatch.setattr(JobQueue, "claim", stuck)
    fleet.worker(max_num_seqs=32)
    first = jobs[: intake.FIRST_PORTION]
    await until(lambda: fleet.has(*first))
    assert len(fleet.engine.requests) == len(first)
    gone.set()
    await until(lambda: fleet.has(*jobs))


async def test_a_job_of_many_choices_holds_as_many_slots(fleet, until) -> None:
    worker = fleet.worker(max_num_seqs=4)
    job = await fleet.submit(sampling={"n": 3, "max_tokens": 10})
    await until(lambda: fleet.has(job))
    assert worker.roster.free_slots == 1
    fleet.engine.say(job, "x", "length", choice=1)
    await until(lambda: worker.roster.free_slots == 2)


async def test_a_cancelled_job_stops_in_the_engine_and_says_so(fleet, until) -> None:
    fleet.worker(worker_id="w")
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "ab")
    await until(lambda: fleet.shows(job, "ab"))
    channel = fleet.connection.keys(0).control("w")
    await until(lambda: fleet.redis.publish(channel, f"cancel {job} 1"))
    await until(lambda: fleet.is_(job, "cancelled"))
    assert (job, None) in fleet.engine.aborted
    last = (await fleet.log(job))[-1]
    assert (last.final, last.finish_reason) == (True, "cancelled")


async def test_a_cancel_for_another_attempt_and_noise_change_nothing(fleet, until) -> None:
    fleet.worker(worker_id="w")
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    channel = fleet.connection.keys(0).control("w")
    await until(lambda: fleet.redis.publish(channel, f"cancel {job} 7"))
    await fleet.redis.publish(channel, b"\xff\x00 what")
    await fleet.redis.publish(channel, "cancel nobody 1")
    await fleet.redis.publish(channel, f"cancel {job} \N{SUPERSCRIPT TWO}")
    fleet.engine.say(job, "fine", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "fine"


async def test_a_job_past_its_deadline_ends_while_it_runs(fleet, until) -> None:
    fleet.worker()
    deadline_s, job = 0.3, ""

    async def begun() -> bool:
        return fleet.has(job) or await expired()

    async def expired() -> bool:
        return await fleet.is_(job, "expired")

    while not job or not await fleet.shows(job, "ab"):  # a slow machine needs a later deadline
        job = await fleet.submit(deadline_s=deadline_s)
        deadline_s *= 2
        await until(begun)
        if fleet.has(job):
            fleet.engine.say(job, "ab")
        await until(expired)
    await until(lambda: (job, None) in fleet.engine.aborted)
    log = await fleet.log(job)
    assert (log[-1].final, log[-1].finish_reason) == (True, "expired")
    assert "".join(event.text for event in log) == "ab"


async def test_a_claim_whose_reply_was_lost_is_released_and_made_again(
    fleet, until, monkeypatch
) -> None:
    claim = JobQueue.claim
    lost = []

    async def lossy(self, count):
        jobs = await claim(self, count)
        if jobs and not lost:
            lost.extend(jobs)
            raise BrokerUnavailable("the reply was lost")
        return jobs

    monkeypatch.setattr(JobQueue, "claim", lossy)
    fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    assert [one.id for one in lost] == [job]
    assert fleet.engine.requests[job].id == f"{job}/2"
    assert await fleet.field(job, "failures") == "0"


async def test_a_lost_reply_of_one_partition_is_made_good_though_another_answered(
    fleet, until, monkeypatch
) -> None:
    run = Connection.run
    claims = []

    async def lossy(self, script, partition, keys, args, **options):
        reply = await run(self, script, partition, keys, args, **options)
        if script is CLAIM and reply[4]:  # its jobs
            claims.append(partition)
            if len(claims) == 2:
                raise BrokerUnavailable("the reply was lost")
        return reply

    connection = Connection(fleet.server.url, namespace=fleet.namespace, partitions=2)
    submission = Submission(connection)
    drafts = [submission.draft(JobRequest(model="m", prompt="x")) for _ in range(2)]
    jobs = [one.id for one in await submission.send(drafts)]
    await connection.aclose()
    monkeypatch.setattr(Connection, "run", lossy)
    fleet.worker(partitions=2)
    await until(lambda: fleet.has(*jobs))
    assert sorted(claims[:2]) == [0, 1]


async def test_a_fenced_job_is_dropped_and_nothing_of_it_is_published(fleet, until) -> None:
    worker = fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "mine")
    await until(lambda: fleet.shows(job, "mine"))
    key = fleet.connection.keys(0).job(job)
    await fleet.redis.hset(key, mapping={"attempt": 2, "owner": "other"})
    fleet.engine.say(job, "foreign")
    await until(lambda: (job, None) in fleet.engine.aborted)
    await until(lambda: len(worker.roster) == 0)
    assert await fleet.text(job) == "mine"
    assert await fleet.state(job) == "running"


async def test_an_ending_that_comes_too_late_changes_nothing(fleet, until) -> None:
    worker = fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    key = fleet.connection.keys(0).job(job)
    await fleet.redis.hset(key, mapping={"attempt": 2, "owner": "other"})
    fleet.engine.say(job, "late", "stop")
    await until(lambda: len(worker.roster) == 0)
    assert await fleet.state(job) == "running"
    assert await fleet.log(job) == []


async def test_leases_are_renewed_while_the_engine_is_in_a_long_step(
    fleet, until, often_renewed
) -> None:
    worker = fleet.worker(lease_s=30, step_limit_s=3600)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.last_heard -= 100  # more than three leases without a word from the engine
    worker.parts.dispatcher.launcher.working_since -= 100
    for _ in range(3):
        await fleet.age_leases(15_000)
        await until(lambda: _renewed(fleet, 15_000))
    assert await fleet.field(job, "attempt") == "1"
    fleet.engine.say(job, "x", "stop")
    await until(lambda: fleet.is_(job, "finished"))


async def _renewed(fleet, within_ms: int) -> bool:
    return all(held["time_since_delivered"] < within_ms for _, held in await fleet.leases())


async def test_an_engine_that_hangs_is_ended_and_its_jobs_go_back(fleet, until) -> None:
    class Hangs(fleet.engine_kind):
        """Not heard of; the second one never stands still for too long."""

        def __init__(self, *given) -> None:
            super().__init__(*given)
            self.last_heard = math.inf if fleet.engines else self.last_heard

    fleet.engine_kind = Hangs
    fleet.worker(step_limit_s=0.2)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    await until(lambda: len(fleet.engines) == 2)
    assert await fleet.field(job, "failures") == "1"
    await until(lambda: fleet.has(job))
    assert fleet.engine.requests[job].id == f"{job}/2"


async def test_a_fault_of_the_workers_own_code_costs_one_job(fleet, until, monkeypatch) -> None:
    from tokenfleet.worker.jobs import Job

    apply = Job.apply

    def broken(self, event):
        if bytes(event.token_ids) == b"boom":
            raise KeyError("boom")
        return apply(self, event)

    monkeypatch.setattr(Job, "apply", broken)
    fleet.worker()
    bad, good = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(bad, good))
    fleet.engine.say(bad, "boom")
    await until(lambda: fleet.is_(bad, "failed"))
    assert await fleet.field(bad, "error_code") == "internal_error"
    fleet.engine.say(good, "ok", "stop")
    await until(lambda: fleet.is_(good, "finished"))


async def test_a_job_claimed_again_by_its_own_worker_never_meets_its_old_self(fleet, until) -> None:
    worker = fleet.worker(max_num_seqs=2)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    old = fleet.engine.requests[job]
    other = fleet.queue("other")
    key = fleet.connection.keys(0).job(job)
    stream, entry = await fleet.redis.hmget(key, "stream", "entry")
    await fleet.redis.xclaim(stream, "workers", "other", 0, [entry], idle=3_600_000, justid=True)
    await until(lambda: other.reclaim())
    await until(lambda: fleet.engine.requests[job].id != old.id)
    assert (job, None) in fleet.engine.aborted
    fleet.engine.say(job, "new", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "new"
    await until(lambda: len(worker.roster) == 0)


async def test_no_step_runs_with_an_empty_slot_while_jobs_wait(fleet, until, monkeypatch) -> None:
    """What is prefetched lasts for nearly a second: a machine that holds the worker up for longer
    empties a slot, and is given another try."""
    ran: list[int] = []
    monkeypatch.setattr(
        "tokenfleet.worker.observing.telemetry.Telemetry.step",
        lambda self, stats: ran.append(stats.running),
    )

    async def running_while_jobs_wait() -> set[int]:
        ran.clear()
        jobs = [await fleet.submit(sampling={"max_tokens": 10 + 7 * (i % 5)}) for i in range(30)]
        worker = fleet.worker(simulated=True, simulated_step_ms=20, max_num_seqs=4, prefetch=8)
        for job in jobs:
            await until(lambda job=job: fleet.is_(job, "finished"))
        assert len(ran) > 100
        worker.drain()
        await fleet.runs[-1]
        last_full = len(ran) - 1 - ran[::-1].index(4)
        return set(ran[ran.index(4) : last_full + 1])

    tries = [await running_while_jobs_wait()]
    while tries[-1] != {4} and len(tries) < 5:
        tries.append(await running_while_jobs_wait())
    assert tries[-1] == {4}, tries


async def test_an_engine_that_hangs_at_its_start_is_ended_and_another_one_serves(
    fleet, until
) -> None:
    fleet.engine_may_start = asyncio.Event()
    fleet.worker(engine_start_timeout_s=0.1)
    job = await fleet.submit()
    await until(lambda: len(fleet.engines) > 1)
    fleet.engine_may_start.set()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "x", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.field(job, "failures") == "0"


async def test_an_engine_process_that_hangs_at_its_start_leaves_nothing_behind(
    fleet, until
) -> None:
    settings = {"simulated_step_ms": 1, "fault": "hang@start:1", "engine_start_timeout_s": 0.5}
    worker = fleet.worker(simulated=True, **settings)
    await asyncio.sleep(0)  # it wires itself when it runs
    first = await until(lambda: worker.parts.host.pid)
    with structlog.testing.capture_logs() as lines:
        await until(lambda: worker.parts.host.pid != first)
    causes = [line["cause"] for line in lines if "cause" in line]
    assert "not ready after 0.5 s; if loading" in causes[0]
    assert not os.path.exists(f"/proc/{first}")  # noqa: ASYNC240, PTH110 - blocks nothing
