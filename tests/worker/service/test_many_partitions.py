"""A worker over several partitions: what one of them does is no matter of the others."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.keys import new_job_id
from tokenfleet.producer.protocol import Event, JobRequest
from tokenfleet.producer.submission import Submission
from tokenfleet.worker import partitions, presence
from tokenfleet.worker.service import EXIT_OK

PARTITIONS = 4


class Parts:
    """The fleet's namespace in partitions."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self.connection = Connection(
            fleet.server.url, namespace=fleet.namespace, partitions=PARTITIONS
        )
        self._submission = Submission(self.connection)

    async def submit(self, partition: int, priority: str = "default") -> str:
        request = JobRequest(model="m", prompt="x", priority=priority)
        draft = self._submission.draft(request, job_id=new_job_id(partition))
        return (await self._submission.send([draft]))[0].id

    async def field(self, job_id: str, name: str) -> str:
        keys = self.connection.keys(int(job_id.rpartition(".")[2]))
        value = await self._fleet.redis.hget(keys.job(job_id), name)
        return "" if value is None else str(value.decode())

    async def shows(self, job_id: str, text: str) -> bool:
        keys = self.connection.keys(int(job_id.rpartition(".")[2]))
        entries = await self._fleet.redis.xrange(keys.events(job_id))
        return "".join(Event.unpack(fields[b"d"]).text for _, fields in entries) == text

    async def is_(self, job_id: str, state: str) -> bool:
        return await self.field(job_id, "state") == state


def silence(worker: Any, partition: int, *scripts: str) -> asyncio.Event:
    """Let a partition's server say nothing to these scripts; set it to end that."""
    connection, speaks = worker.parts.connection, asyncio.Event()
    run = connection.run

    async def hangs(script: Any, at: int, *rest: Any, **more: Any) -> Any:
        if at == partition and script.name in scripts:
            await speaks.wait()
        return await run(script, at, *rest, **more)

    connection.run = hangs
    return speaks


@pytest.fixture
async def parts(fleet):
    parts = Parts(fleet)
    yield parts
    await parts.connection.aclose()


async def test_tokens_of_other_partitions_do_not_wait_for_one_that_is_silent(fleet, parts, until):
    worker = fleet.worker(partitions=PARTITIONS, max_num_seqs=PARTITIONS)
    jobs = [await parts.submit(p) for p in range(PARTITIONS)]
    await until(lambda: fleet.has(*jobs))
    speaks = silence(worker, 0, "emit", "finish")
    for text in ("a", "ab", "abc"):
        for job in jobs:
            fleet.engine.say(job, text[-1])
        for job in jobs[1:]:
            await until(lambda job=job, text=text: parts.shows(job, text))
    fleet.engine.say(jobs[1], "", "stop")
    await until(lambda: parts.is_(jobs[1], "finished"))
    assert await parts.shows(jobs[0], "")
    speaks.set()
    await until(lambda: parts.shows(jobs[0], "abc"))


async def test_jobs_of_other_partitions_are_handed_back_while_one_is_silent(fleet, parts, until):
    worker = fleet.worker(partitions=PARTITIONS, max_num_seqs=PARTITIONS, grace_s=0.0)
    jobs = [await parts.submit(p) for p in range(PARTITIONS)]
    await until(lambda: fleet.has(*jobs))
    speaks = silence(worker, 0, "release")
    worker.drain()
    await until(lambda: len(worker.roster) == 1)
    assert [await parts.field(job, "state") for job in jobs] == ["running", *["waiting"] * 3]
    speaks.set()
    assert await fleet.runs[0] == EXIT_OK
    assert await parts.is_(jobs[0], "waiting")


async def test_an_urgent_job_displaces_a_batch_job_of_another_partition(fleet, parts, until):
    worker = fleet.worker(partitions=PARTITIONS, max_num_seqs=2)
    dear, cheap = [await parts.submit(p, "batch") for p in (0, 1)]
    await until(lambda: fleet.has(dear, cheap))
    fleet.engine.say(dear, "much more")
    fleet.engine.say(cheap, "few")
    await until(lambda: parts.shows(cheap, "few"))
    await until(lambda: parts.shows(dear, "much more"))
    urgent = await parts.submit(3, "interactive")
    await until(lambda: fleet.has(urgent))
    await until(lambda: parts.is_(cheap, "waiting"))
    assert await parts.field(cheap, "preempted") == "1"
    assert await parts.field(dear, "state") == "running"
    assert len(worker.roster) == 2
    fleet.engine.say(urgent, "now", "stop")
    await until(lambda: bool(fleet.engine.requests[cheap].resume))
    assert fleet.engine.requests[cheap].resume == (tuple(b"few"),)
    await until(lambda: parts.is_(urgent, "finished"))


async def test_urgent_jobs_beside_and_beyond_the_batch_jobs_partitions_are_all_taken(
    fleet, parts, until
):
    worker = fleet.worker(partitions=PARTITIONS, max_num_seqs=4)
    batch = [await parts.submit(p, "batch") for p in (0, 0, 1, 1)]
    await until(lambda: fleet.has(*batch))
    urgent = [await parts.submit(p, "interactive") for p in (0, 2, 2)]
    await until(lambda: fleet.has(*urgent))
    await until(lambda: len(worker.roster) == 4)
    states = [await parts.field(job, "state") for job in batch]
    assert sorted(states) == ["running", "waiting", "waiting", "waiting"]


async def test_of_full_workers_that_hear_of_one_urgent_job_one_puts_a_batch_job_back(
    fleet, parts, until
):
    workers = [fleet.worker(partitions=PARTITIONS, max_num_seqs=1) for _ in range(3)]
    batch = [await parts.submit(p, "batch") for p in range(3)]
    await until(lambda: all(len(worker.roster) == 1 for worker in workers))
    urgent = await parts.submit(3, "interactive")
    await until(lambda: parts.is_(urgent, "running"))
    owner = await parts.field(urgent, "owner")
    (took,) = [worker for worker in workers if worker.worker_id == owner]
    await until(lambda: [job.id for job in took.roster] == [urgent])
    put_back = [await parts.field(job, "preempted") for job in batch]
    assert sorted(put_back) == ["", "", "1"]


async def test_a_batch_job_that_cannot_be_put_back_now_makes_way_later(fleet, parts, until):
    worker = fleet.worker(partitions=PARTITIONS, max_num_seqs=1)
    batch = await parts.submit(0, "batch")
    await until(lambda: fleet.has(batch))
    connection = worker.parts.connection
    run, refused = connection.run, []

    async def refuses(script: Any, at: int, *rest: Any, **more: Any) -> Any:
        if script.name == "release" and not refused:
            refused.append(at)
            raise OSError("the connection broke")
        return await run(script, at, *rest, **more)

    connection.run = refuses
    urgent = await parts.submit(1, "interactive")
    await until(lambda: fleet.has(urgent))
    await until(lambda: parts.is_(batch, "waiting"))
    assert refused == [0]
    assert await parts.field(urgent, "state") == "running"


async def test_jobs_of_other_partitions_are_claimed_at_once_while_one_is_silent(
    fleet, parts, until, monkeypatch
):
    monkeypatch.setattr(partitions, "LOOK_S", 0.05)
    worker = fleet.worker(partitions=PARTITIONS)
    await until(lambda: worker.parts.intake.last_claim is not None)
    silence(worker, 0, "peek", "phantoms")
    looks = worker.parts.broker.away
    seen = asyncio.Event()

    def away(call: str, error: Exception) -> None:
        looks(call, error)
        seen.set()

    monkeypatch.setattr(worker.parts.broker, "away", away)
    await parts.connection.execute("DEL", parts.connection.keys(1).bell("m"))
    await seen.wait()
    job = await parts.submit(1)
    await until(lambda: fleet.has(job))


async def test_a_worker_is_ready_and_in_the_table_while_one_partition_is_silent(
    fleet, parts, until, monkeypatch
):
    monkeypatch.setattr(partitions, "LOOK_S", 0.05)
    monkeypatch.setattr(presence, "HEARTBEAT_S", 0.01)
    worker = fleet.worker(partitions=PARTITIONS)
    await until(lambda: worker.parts.presence.registered)
    silence(worker, 0, "heartbeat")
    for _ in range(3):
        before = worker.parts.presence.last_written
        await until(lambda before=before: worker.parts.presence.last_written > before)
    for partition in range(1, PARTITIONS):
        line = parts.connection.keys(partition).worker(worker.worker_id)
        seen = int(await fleet.redis.hget(line, "seen"))
        await until(lambda line=line, seen=seen: _is_newer(fleet, line, seen))


async def _is_newer(fleet: Any, line: str, seen: int) -> bool:
    return int(await fleet.redis.hget(line, "seen")) > seen


async def test_a_publisher_ends_though_a_call_of_it_took_a_cancel_for_its_own(fleet, parts, until):
    worker = fleet.worker(partitions=PARTITIONS, grace_s=0.0)
    job = await parts.submit(2)
    await until(lambda: fleet.has(job))
    connection = worker.parts.connection
    run, deaf = connection.run, asyncio.Event()

    async def takes_a_cancel(script: Any, *rest: Any, **more: Any) -> Any:
        if script.name == "emit" and not deaf.is_set():
            deaf.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return await run(script, *rest, **more)

    connection.run = takes_a_cancel
    fleet.engine.say(job, "a")
    await deaf.wait()
    fleet.runs[0].cancel()
    await asyncio.wait(fleet.runs)
    assert fleet.runs[0].cancelled()
