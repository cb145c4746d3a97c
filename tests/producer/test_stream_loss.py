"""A log that is shorter than what was handed out: Redis lost writes that it had acknowledged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import SlotNotCoveredError

from tokenfleet.producer.errors import StreamInterrupted
from tokenfleet.producer.protocol import Choice, Event, JobResult
from tokenfleet.worker.claims import flat

TEXT = "abcdefghijklmnopqrst"


class Loser:
    """A worker, and a Redis that forgets the end of its job's log."""

    def __init__(self, lab: Any, queue: Any, job: Any) -> None:
        self.lab = lab
        self.queue = queue
        self.job = job
        self.offset = 0

    async def log(self, *ends: int) -> None:
        """One event up to each of these offsets."""
        for end in ends:
            span = range(self.offset, end)
            text = TEXT[self.offset : end]
            event = Event(self.offset, token_ids=tuple(span), text=text, attempt=self.job.attempt)
            await self.emit(event)

    async def emit(self, event: Event) -> None:
        outcome = await self.queue.emit([(self.job.id, self.job.attempt, flat([event]))])
        assert (outcome.fenced, outcome.behind) == (frozenset(), frozenset())
        self.offset = event.end

    async def lose(self, down_to: int) -> None:
        """Forget what is behind an offset; the job is claimed again, and goes on from there."""
        names = self.lab.keys
        entries = await self.lab.raw.xrange(names.events(self.job.id))
        kept = [one for one in entries if int(one[0].split(b"-")[0]) <= down_to]
        await self.lab.raw.delete(names.events(self.job.id))
        for entry, fields in kept:
            await self.lab.raw.xadd(names.events(self.job.id), fields, id=entry)
        last = kept[-1][0] if kept else b"0-0"
        state = {"offset": down_to, "last": last}
        await self.lab.raw.hset(names.job(self.job.id), mapping=state)
        await self.queue.release([self.job], "the log is shorter than it was")
        (self.job,) = await self.queue.claim(1)
        self.offset = down_to

    async def finish(self, *texts: str, tokens: list[tuple[int, ...]]) -> None:
        choices = tuple(
            Choice(text=text, token_ids=ids, finish_reason="length")
            for text, ids in zip(texts, tokens)
        )
        assert await self.queue.finish(self.job, [], JobResult(choices=choices))


@pytest.fixture
async def loser(valkey_lab: Any) -> Loser:
    queue = await valkey_lab.queue("w1")
    await valkey_lab.submit()
    (job,) = await queue.claim(1)
    return Loser(valkey_lab, queue, job)


class Reader:
    """A subscriber that keeps all that it is given."""

    def __init__(self, loser: Loser) -> None:
        self.client = loser.lab.client(silence_s=0.2)
        self.events: list[Event] = []
        self._stream = self.client.job(loser.job.id).stream()
        self._task = asyncio.ensure_future(self._read())
        self._grown = asyncio.Event()

    async def _read(self) -> None:
        async for event in self._stream:
            self.events.append(event)
            self._grown.set()

    async def has(self, tokens: int) -> None:
        while sum(len(e.token_ids) for e in self.events) < tokens:
            self._grown.clear()
            await self._grown.wait()

    async def check(self, *texts: str, tokens: list[tuple[int, ...]]) -> None:
        await self._task
        offset = 0
        for event in self.events:
            assert event.offset == offset
            offset = event.end
        for number, (text, ids) in enumerate(zip(texts, tokens)):
            mine = [e for e in self.events if e.choice == number]
            assert tuple(t for e in mine for t in e.token_ids) == ids
            assert "".join(e.text for e in mine) == text
        assert [e.final for e in self.events] == [False] * (len(self.events) - 1) + [True]


@pytest.mark.parametrize("kept", [0, 4, 8])
@pytest.mark.parametrize("ends", [(20,), (9, 11, 20), (12, 20), tuple(range(9, 21))])
async def test_what_is_made_again_is_not_seen_again(loser, kept, ends) -> None:
    reader = Reader(loser)
    await loser.log(4, 8, 12)
    await reader.has(12)
    await loser.lose(kept)
    await loser.log(*ends)
    everything = [tuple(range(20))]
    await loser.finish(TEXT, tokens=everything)
    await reader.check(TEXT, tokens=everything)


async def test_a_subscriber_that_heard_nothing_of_the_loss_finds_it_in_the_log(loser) -> None:
    reader = Reader(loser)
    await loser.log(4, 8, 12)
    await reader.has(12)
    hub = reader.client.link.reader.hub
    deaf, hub_subscribe = asyncio.Event(), hub._lines
    for line in hub_subscribe.values():
        line.hear = lambda reply: deaf.set()  # messages come and are not understood
    await loser.lose(4)
    await loser.log(10, 16, 20)
    everything = [tuple(range(20))]
    await loser.finish(TEXT, tokens=everything)
    await reader.check(TEXT, tokens=everything)


async def test_a_log_lost_twice_is_passed_over_twice(loser) -> None:
    reader = Reader(loser)
    await loser.log(4, 8, 12)
    await reader.has(12)
    await loser.lose(4)
    await loser.log(7, 10)
    await loser.lose(0)
    for line in reader.client.link.reader.hub._lines.values():
        line.drop()  # as a failover does
    await loser.log(5, 14, 20)
    everything = [tuple(range(20))]
    await loser.finish(TEXT, tokens=everything)
    await reader.check(TEXT, tokens=everything)


async def test_choices_that_come_in_another_order_are_each_passed_over(loser) -> None:
    reader = Reader(loser)

    async def say(choice: int, first: int, last: int, offset: int) -> None:
        text = (TEXT if choice == 0 else TEXT.upper())[first:last]
        ids = tuple(range(100 * choice + first, 100 * choice + last))
        attempt = loser.job.attempt
        await loser.emit(Event(offset, token_ids=ids, text=text, choice=choice, attempt=attempt))

    await say(0, 0, 3, 0)
    await say(1, 0, 5, 3)
    await reader.has(8)
    await loser.lose(3)
    await say(0, 3, 8, 3)  # the same offsets, the other choice
    await say(1, 0, 2, 8)
    await say(1, 2, 10, 10)
    await say(0, 8, 10, 18)
    tokens = [tuple(range(10)), tuple(range(100, 110))]
    await loser.finish(TEXT[:10], TEXT[:10].upper(), tokens=tokens)
    await reader.check(TEXT[:10], TEXT[:10].upper(), tokens=tokens)


async def test_a_stream_to_a_shard_without_a_master_is_interrupted_and_goes_on_later(
    valkey_lab, monkeypatch
):
    lab, client = valkey_lab, valkey_lab.client()
    queue, job_id = await lab.queue(), await lab.submit()
    (job,) = await queue.claim(1)
    await queue.finish(job, flat([lab.token(0)]), None, state="cancelled")

    def uncovered(_partition: int) -> str:
        raise SlotNotCoveredError("slot 7 is not covered by the cluster")

    with monkeypatch.context() as failing:
        failing.setattr(client.link.connection, "node_of", uncovered)
        with pytest.raises(StreamInterrupted, match="slot 7 is not covered"):
            await anext(client.job(job_id).stream())
    assert [event.final async for event in client.job(job_id).stream()] == [False, True]
