"""What a reader is told of a job that Redis does not know, or knows no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenfleet.producer.errors import JobExpired
from tokenfleet.producer.keys import new_job_id
from tokenfleet.producer.stream import JobReader
from tokenfleet.worker.claims import flat

from .writing import WORDS, check, collect, listens, started, writer_for


async def test_a_job_that_redis_does_not_know_has_expired(valkey_lab):
    job = valkey_lab.client().job(new_job_id(0))
    for call in (job.result(), job.status(), job.cancel(), collect(job.stream())):
        with pytest.raises(JobExpired):
            await call


async def test_a_job_that_vanishes_while_one_listens_has_expired(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(1)
    client = valkey_lab.client(silence_s=0.05)
    _, task = await started(client.job(writer.job.id).stream())
    keys = valkey_lab.keys
    await valkey_lab.raw.delete(keys.job(writer.job.id), keys.events(writer.job.id))
    with pytest.raises(JobExpired):
        await task


@pytest.fixture
def found_gone(monkeypatch) -> asyncio.Event:
    """Set once a reader has looked for a job and Redis did not know it."""
    gone, look = asyncio.Event(), JobReader.look

    async def told(*args: Any, **options: Any) -> Any:
        found = await look(*args, **options)
        if found.state is None:
            gone.set()
        return found

    monkeypatch.setattr(JobReader, "look", told)
    return gone


async def test_a_running_job_that_redis_has_forgotten_is_waited_for_until_it_is_given_back(
    valkey_lab, found_gone, until
):
    """By streams and by who waits for its result, for silence_s."""
    writer = await writer_for(valkey_lab)
    await writer.write(2)
    job = valkey_lab.client(silence_s=240.0).job(writer.job.id)
    (events, stream), result = await started(job.stream()), asyncio.ensure_future(job.result())
    log, keys = await valkey_lab.log(job.id), valkey_lab.keys
    await until(lambda: listens(valkey_lab, job.id))
    await valkey_lab.raw.delete(keys.job(job.id), keys.events(job.id), keys.queue("m", "default"))
    await valkey_lab.raw.client_kill_filter(_type="pubsub")
    await found_gone.wait()
    adopted = await writer.queue.adopt(writer.job, flat(log))
    assert adopted is not None
    writer.job = adopted
    await writer.write(1)
    await writer.finish()
    await stream
    assert check(events) == (await result).text == "".join(WORDS[:3])


async def test_a_waiting_job_that_redis_has_forgotten_is_not_waited_for(valkey_lab, until):
    """Nobody has it to give it back."""
    client = valkey_lab.client(silence_s=240.0)
    job = await client.submit(model="m", prompt="x")
    waiting = [asyncio.ensure_future(collect(job.stream())), asyncio.ensure_future(job.result())]
    await until(lambda: listens(valkey_lab, job.id))
    await valkey_lab.raw.delete(valkey_lab.keys.job(job.id))
    await valkey_lab.raw.client_kill_filter(_type="pubsub")
    for one in waiting:
        with pytest.raises(JobExpired):
            await one


async def test_a_log_that_is_gone_has_expired_while_the_result_still_answers(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(2)
    await writer.finish()
    job = valkey_lab.client().job(writer.job.id)
    await valkey_lab.raw.delete(valkey_lab.keys.events(job.id))
    with pytest.raises(JobExpired, match="log"):
        await collect(job.stream())
    assert (await job.result()).text == "".join(WORDS[:2])
