"""A job that ends with its last subscriber does so then, and no earlier."""

from __future__ import annotations

import asyncio

import pytest

from tokenfleet.producer.protocol import Event
from tokenfleet.worker.claims import flat

from .writing import WORDS, collect, writer_for


async def test_a_job_ends_with_its_last_subscriber_when_it_asked_for_that(valkey_lab):
    writer = await writer_for(valkey_lab, on_disconnect="cancel")
    await writer.write(1)
    client, other = valkey_lab.client(), valkey_lab.client()
    streams = [one.job(writer.job.id).stream() for one in (client, other)]
    for stream in streams:
        await anext(stream)
    await streams[0].aclose()
    assert not (await client.job(writer.job.id).status()).cancel_requested
    await streams[1].aclose()
    assert (await client.job(writer.job.id).status()).cancel_requested


async def test_a_waiting_job_ends_with_its_subscriber_too(valkey_lab):
    job = valkey_lab.client().job(await valkey_lab.submit(on_disconnect="cancel"))
    task = asyncio.create_task(collect(job.stream()))

    async def watched() -> bool:
        return "watched" in await valkey_lab.fields(job.id)

    await valkey_lab.until(watched)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await valkey_lab.state(job.id) == "cancelled"


async def test_a_subscriber_whose_connection_breaks_frees_the_slot_by_the_next_emits(valkey_lab):
    writer = await writer_for(valkey_lab, on_disconnect="cancel")
    await writer.write(1)
    client = valkey_lab.client()
    stream = client.job(writer.job.id).stream()
    await anext(stream)
    line = next(iter(client.link.reader.hub._lines.values()))
    line._task.cancel()  # as if the process had died: nothing says goodbye
    await asyncio.gather(line._task, return_exceptions=True)
    cancelled: frozenset[str] = frozenset()
    while not cancelled:
        event = Event(offset=writer.offset, token_ids=(1,), text="x", attempt=1)
        writer.offset += 1
        outcome = await writer.queue.emit([(writer.job.id, 1, flat([event]))])
        cancelled = outcome.cancelled
        await asyncio.sleep(0.01)
    assert cancelled == {writer.job.id}
    await stream.aclose()


async def test_a_job_nobody_has_listened_to_yet_is_not_taken_for_abandoned(valkey_lab):
    writer = await writer_for(valkey_lab, on_disconnect="cancel")
    await writer.write(5)
    await writer.finish()
    assert await valkey_lab.state(writer.job.id) == "finished"


async def test_a_job_that_continues_does_so_when_its_subscriber_leaves(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(1)
    stream = valkey_lab.client().job(writer.job.id).stream()
    await anext(stream)
    await stream.aclose()
    await writer.write(2)
    await writer.finish()
    assert (await valkey_lab.client().job(writer.job.id).result()).text == "".join(WORDS[:3])


async def test_waiting_for_a_result_counts_as_no_subscriber(valkey_lab):
    client = valkey_lab.client()
    job = client.job(await valkey_lab.submit(on_disconnect="cancel"))
    with pytest.raises(TimeoutError):
        await job.result(timeout_s=0.01)
    assert await valkey_lab.state(job.id) == "waiting"
