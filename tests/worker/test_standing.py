"""Claims that stand at the server: what they take, and what they do not take once withdrawn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenfleet.producer.errors import KeyOccupied
from tokenfleet.producer.protocol import JobRequest
from tokenfleet.worker.standing import Standing

LONG_S = 60.0


async def stood(lab: Any, queue: Any, count: int = 2) -> tuple[Standing, asyncio.Future[Any]]:
    """A claim that the server lets wait."""
    assert await queue.claim(1) == []
    standing = queue.stand(count, LONG_S)
    jobs = asyncio.ensure_future(standing.jobs())
    ticket = lab.keys.standing(queue.worker_id)
    await lab.until(lambda: lab.raw.exists(ticket))
    return standing, jobs


async def standing_jobs(lab: Any, queue: Any, jobs: asyncio.Future[Any]) -> list[Any]:
    """What it brings; one whose time was over is followed by another, as a worker does."""
    while not (found := await jobs):
        jobs = asyncio.ensure_future(queue.stand(2, LONG_S).jobs())
    return found


async def test_a_claim_that_stands_takes_the_job_that_comes(lab):
    queue = await lab.queue()
    _, jobs = await stood(lab, queue)
    job_id = await lab.submit()
    (job,) = await standing_jobs(lab, queue, jobs)
    assert (job.id, job.attempt) == (job_id, 1)
    fields = await lab.fields(job_id)
    assert (fields["state"], fields["owner"]) == ("running", queue.worker_id)
    assert not queue.cut_short
    assert not await lab.raw.exists(lab.keys.standing(queue.worker_id))


async def test_a_claim_that_was_withdrawn_takes_nothing_when_a_job_wakes_it(lab):
    queue = await lab.queue()
    standing, jobs = await stood(lab, queue)
    while not await standing.withdraw():  # its time was over meanwhile
        assert await jobs == []
        standing, jobs = await stood(lab, queue)
    job_id = await lab.submit()
    assert await jobs == []
    assert await lab.state(job_id) == "waiting"
    assert [job.id for job in await queue.claim(1)] == [job_id]


async def test_a_claim_that_has_run_is_too_late_to_withdraw(lab):
    queue = await lab.queue()
    standing, jobs = await stood(lab, queue)
    await lab.submit()
    assert len(await standing_jobs(lab, queue, jobs)) == 1
    assert not await standing.withdraw()


async def test_a_claim_takes_no_more_than_it_was_made_for(lab):
    queue = await lab.queue()
    _, jobs = await stood(lab, queue)
    request = JobRequest(model="m", prompt="x")
    drafts = [lab.submission.draft(request) for _ in range(3)]
    await lab.submission.send(drafts)
    found = await standing_jobs(lab, queue, jobs)
    assert [job.id for job in found] == [draft.id for draft in drafts[:2]]


async def test_a_server_that_forgot_the_script_while_a_claim_stood_is_told_it_again(lab):
    queue = await lab.queue()
    _, jobs = await stood(lab, queue)
    await lab.raw.script_flush()
    job_id = await lab.submit()
    assert [job.id for job in await standing_jobs(lab, queue, jobs)] == [job_id]


async def test_no_claim_stands_where_the_last_one_left_something_or_has_many_places_to_look(lab):
    queue = await lab.queue()
    assert queue.stand(1, LONG_S) is None  # nothing is known of the queues yet
    assert await queue.claim(1) == []
    assert queue.stand(1, LONG_S) is not None
    spread = await lab.queue("w2", partitions=2)
    assert await spread.claim(1) == []
    assert spread.stand(1, LONG_S) is None


async def test_a_claim_whose_connection_is_lost_says_that_jobs_may_be_held(lab, until):
    queue = await lab.queue()
    _, jobs = await stood(lab, queue)
    await queue.connection._lines.hang_up()
    await until(jobs.done)
    assert isinstance(jobs.exception(), Exception)
    assert queue.cut_short


async def test_what_somebody_else_has_at_the_tickets_key_is_named_and_left_alone(lab):
    queue = await lab.queue()
    ticket = lab.keys.standing(queue.worker_id)
    await lab.raw.sadd(ticket, "theirs")
    assert await queue.claim(1) == []
    job_id = await lab.submit()
    with pytest.raises(KeyOccupied, match="standing:w1"):
        await queue.stand(2, LONG_S).jobs()
    assert await lab.raw.smembers(ticket) == {b"theirs"}
    assert [job.id for job in await queue.claim(1)] == [job_id]
