"""Streams: whatever happens between Redis and a subscriber, every token comes once and in order."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from tokenfleet.producer.errors import InvalidJob, StreamInterrupted
from tokenfleet.producer.protocol import Choice, Event, JobResult
from tokenfleet.producer.subscription import MOST_WAITING, Subscription
from tokenfleet.worker.claims import flat

from .writing import WORDS, Writer, check, collect, listens, started, writer_for


async def test_a_subscriber_that_joins_at_any_moment_sees_the_whole_text(valkey_lab):
    lab = valkey_lab
    client = lab.client()
    dice = random.Random(7)
    for _ in range(20):
        writer = await writer_for(lab)
        moments = sorted(dice.randrange(31) for _ in range(10))
        tasks = []
        for written in range(31):
            joining = moments.count(written)
            tasks += [
                asyncio.create_task(collect(client.job(writer.job.id).stream()))
                for _ in range(joining)
            ]
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            if written < 30:
                await writer.write(1)
        await writer.finish()
        result = await client.job(writer.job.id).result()
        for events in await asyncio.gather(*tasks):
            assert check(events) == result.text


async def test_a_stream_that_goes_on_from_an_offset_has_the_rest(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(20)
    await writer.finish()
    client = valkey_lab.client()
    for offset in range(21):
        events = await collect(client.job(writer.job.id).stream(from_offset=offset))
        assert check(events, offset) == "".join(WORDS[offset:20])


async def test_an_offset_inside_an_event_gives_the_tokens_from_there(valkey_lab):
    queue = await valkey_lab.queue()
    job_id = await valkey_lab.submit()
    (job,) = await queue.claim(1)
    probs = ({1: -0.1}, {2: -0.2}, {3: -0.3})
    event = Event(offset=0, token_ids=(1, 2, 3), text="abc", attempt=1, logprobs=probs)
    await queue.finish(job, flat([event]), JobResult(choices=(Choice(text="abc"),)))
    first, _ = await collect(valkey_lab.client().job(job_id).stream(from_offset=2))
    assert (first.offset, first.token_ids, first.logprobs) == (2, (3,), probs[2:])


async def test_an_offset_beyond_the_end_brings_the_terminal_event(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(3)
    await writer.finish()
    (event,) = await collect(valkey_lab.client().job(writer.job.id).stream(from_offset=100))
    assert event.final


async def test_an_offset_beyond_the_end_brings_the_terminal_event_also_live(valkey_lab, until):
    """And not only when the stream has been silent for long."""
    writer = await writer_for(valkey_lab)
    await writer.write(3)
    job = valkey_lab.client(silence_s=240.0).job(writer.job.id)
    following = asyncio.ensure_future(collect(job.stream(from_offset=100)))
    await until(lambda: listens(valkey_lab, job.id))
    await writer.finish()
    (event,) = await following
    assert event.final


async def test_a_negative_offset_is_refused(valkey_lab):
    job = valkey_lab.client().job(await valkey_lab.submit())
    with pytest.raises(InvalidJob, match="from_offset"):
        await collect(job.stream(from_offset=-1))


async def test_text_without_a_token_is_streamed_in_its_place(valkey_lab):
    queue = await valkey_lab.queue()
    job_id = await valkey_lab.submit()
    (job,) = await queue.claim(1)
    texts, task = await _live(valkey_lab, job_id)
    for offset, ids, text in ((0, (1,), "a"), (1, (), "b"), (1, (), "c"), (1, (2,), "d")):
        event = Event(offset=offset, token_ids=ids, text=text, attempt=1)
        await queue.emit([(job.id, 1, flat([event]))])
    await queue.finish(job, [], JobResult(choices=(Choice(text="abcd"),)))
    await task
    assert "".join(texts) == "abcd"


async def test_a_client_uses_one_subscriber_connection_for_all_its_streams(valkey_lab):
    client = valkey_lab.client()
    queue = await valkey_lab.queue()
    jobs = [client.job(await valkey_lab.submit()) for _ in range(50)]
    tasks = [asyncio.create_task(collect(job.stream())) for job in jobs]
    for claimed in await queue.claim(50):
        writer = Writer(queue, claimed)
        await writer.write(3)
        await writer.finish()
    for events in await asyncio.gather(*tasks):
        assert check(events) == "".join(WORDS[:3])
    assert client.link.reader.hub.num_lines == 1
    assert await _subscribers(valkey_lab) == 0


async def test_streams_joined_at_once_are_asked_for_in_one_command(own_lab):
    """And one that is left before that is not asked for."""
    hub = own_lab.client().link.reader.hub
    first = await hub.subscribe(0, "first")
    before = await _subscribe_calls(own_lab)
    at_once = Subscription(0, "at once")
    adding = hub.home_of(0).add(at_once)
    adding.send(None)  # until it waits to be confirmed
    await hub.unsubscribe(at_once)
    adding.close()
    joining = [asyncio.create_task(hub.subscribe(0, f"c{n}")) for n in range(9)]
    left = asyncio.create_task(hub.subscribe(0, "left"))
    await asyncio.sleep(0)
    left.cancel()
    joined = await asyncio.gather(*joining)
    with pytest.raises(asyncio.CancelledError):
        await left
    assert await _subscribe_calls(own_lab) == before + 1
    heard = [await own_lab.raw.publish(f"c{n}", str(n)) for n in range(9)]
    assert heard == [1] * 9
    assert await own_lab.raw.publish("left", "x") == 0
    assert await own_lab.raw.publish("at once", "x") == 0
    for number, ear in enumerate(joined):
        while not isinstance(message := await ear.get(60.0), bytes):
            assert message is not None
        assert message == str(number).encode()
    for ear in (first, *joined):
        await hub.unsubscribe(ear)
    assert await own_lab.raw.publish("c0", "x") == 0


async def _subscribe_calls(lab: Any) -> int:
    stats = await lab.raw.info("commandstats")
    return int(stats["cmdstat_subscribe"]["calls"])


async def test_a_dropped_subscriber_connection_loses_and_repeats_nothing(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(1)
    events, task = await started(valkey_lab.client().job(writer.job.id).stream())
    for _ in range(10):
        await writer.write(1)
        await valkey_lab.raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await writer.write(1)
    await writer.finish()
    await task
    assert check(events) == "".join(WORDS[:21])


async def test_messages_that_pub_sub_never_brought_are_read_from_the_log(valkey_lab):
    """Deaf: subscribed, but no message arrives. The silence check finds what was logged."""
    writer = await writer_for(valkey_lab)
    await writer.write(1)
    client = valkey_lab.client(silence_s=0.05)
    events, task = await started(client.job(writer.job.id).stream())
    line = next(iter(client.link.reader.hub._lines.values()))
    line.hear = lambda reply: None
    await writer.write(5)
    await writer.finish()
    await task
    assert check(events) == "".join(WORDS[:6])


async def test_a_gap_between_messages_is_filled_from_the_log(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(1)
    client = valkey_lab.client(silence_s=60.0)
    events, task = await started(client.job(writer.job.id).stream())
    line = next(iter(client.link.reader.hub._lines.values()))
    hear, heard = line.hear, itertools.count()

    def lossy(reply: Any) -> None:
        if reply[0] != b"message" or next(heard) not in (3, 4, 11):
            hear(reply)

    line.hear = lossy
    await writer.write(20)
    await writer.finish()
    assert next(heard) > 11
    await task
    assert check(events) == "".join(WORDS[:21])


async def test_a_slow_subscriber_reads_the_log_instead_of_filling_memory(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(1)
    stream = valkey_lab.client().job(writer.job.id).stream()
    events = [await anext(stream)]
    queue, job = writer.queue, writer.job
    total = MOST_WAITING + 50
    batch = [Event(offset=1 + n, token_ids=(n,), text="x", attempt=1) for n in range(total)]
    await queue.emit([(job.id, 1, flat(batch))])
    writer.offset = total + 1
    await writer.finish()
    events += await collect(stream)
    assert check(events).count("x") == total


async def test_a_stream_survives_a_server_that_dies_and_comes_back(own_lab):
    writer = await writer_for(own_lab)
    await writer.write(2)
    events, task = await started(own_lab.client().job(writer.job.id).stream())
    own_lab.server.kill()
    own_lab.server.start()
    await writer.write(5)
    await writer.finish()
    await task
    assert check(events) == "".join(WORDS[:7])


async def test_a_server_that_stays_away_interrupts_the_stream_at_its_offset(own_lab):
    writer = await writer_for(own_lab)
    await writer.write(4)
    client = own_lab.client(connect_timeout_s=3.0, silence_s=0.1)
    stream = client.job(writer.job.id).stream()
    events = [await anext(stream) for _ in range(4)]
    own_lab.server.kill()
    with pytest.raises(StreamInterrupted) as caught:
        await collect(stream)
    assert caught.value.offset == events[-1].end == 4
    assert caught.value.retryable
    own_lab.server.start()
    await writer.write(2)
    await writer.finish()
    rest = await collect(own_lab.client().job(writer.job.id).stream(from_offset=4))
    assert check(events + rest) == "".join(WORDS[:6])


@pytest.mark.parametrize(
    "noise", [b"", b"x", b"\xff \xff", b"0-0 1-0 x", b"0-0 1-x \x80", b"0-0  1-0 \x80"]
)
async def test_what_nobody_can_read_on_a_jobs_channel_changes_nothing(valkey_lab, noise, until):
    writer = await writer_for(valkey_lab)
    await writer.write(1)
    job = valkey_lab.client().job(writer.job.id)
    (events, stream), result = await started(job.stream()), asyncio.ensure_future(job.result())
    await until(lambda: listens(valkey_lab, job.id))
    await valkey_lab.raw.publish(valkey_lab.keys.events(job.id), noise)
    await writer.write(1)
    await writer.finish()
    await stream
    assert check(events) == (await result).text == "".join(WORDS[:2])


async def test_an_event_of_a_newer_version_interrupts_the_stream_for_good(valkey_lab):
    """The next version of this library reads it; to ask again with this one is no use."""
    writer = await writer_for(valkey_lab)
    await writer.write(1)
    newer = Event(offset=1, token_ids=(1,), text="w").pack().replace(b"text", b"tone")
    events, stream = await started(valkey_lab.client(silence_s=0.05).job(writer.job.id).stream())
    await valkey_lab.raw.xadd(valkey_lab.keys.events(writer.job.id), {"d": newer}, id="2-0")
    with pytest.raises(StreamInterrupted, match="tone") as cut:
        await stream
    assert [event.text for event in events] == [WORDS[0]]
    assert (cut.value.offset, cut.value.retryable) == (1, False)


async def test_the_stream_goes_on_in_the_next_attempt_where_the_first_one_stopped(valkey_lab):
    writer = await writer_for(valkey_lab)
    await writer.write(3)
    events, task = await started(valkey_lab.client().job(writer.job.id).stream())
    await valkey_lab.expire_lease(writer.job)
    other = await valkey_lab.queue("w2")
    assert await other.reclaim() == 1
    (job,) = await other.claim(1)
    heir = Writer(other, job)
    assert heir.offset == 3
    await heir.write(3)
    await heir.finish()
    await task
    assert check(events) == "".join(WORDS[:6])
    assert [event.attempt for event in events] == [1, 1, 1, 2, 2, 2, 2]


async def _live(lab: Any, job_id: str) -> tuple[list[str], asyncio.Task[None]]:
    texts: list[str] = []

    async def fill() -> None:
        texts.extend([event.text async for event in lab.client().job(job_id).stream()])

    task = asyncio.create_task(fill())

    async def listening() -> bool:
        return await _subscribers(lab) > 0

    await lab.until(listening)
    return texts, task


async def _subscribers(lab: Any) -> int:
    channels = await lab.raw.execute_command("PUBSUB", "CHANNELS", f"{lab.keys.prefix}:e:*")
    return len(channels)
