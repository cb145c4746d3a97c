"""A worker that writes the log of one job word by word, and what its readers see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tokenfleet.producer.protocol import Choice, Event, JobResult
from tokenfleet.worker.claims import flat

WORDS = [f"w{n} " for n in range(30)]


class Writer:
    """A worker that logs the words of one job, one call each, when told to."""

    def __init__(self, queue: Any, job: Any) -> None:
        self.queue = queue
        self.job = job
        self.offset = job.offset

    async def write(self, count: int) -> None:
        for _ in range(count):
            event = Event(
                offset=self.offset,
                token_ids=(self.offset,),
                text=WORDS[self.offset % len(WORDS)],
                attempt=self.job.attempt,
            )
            await self.queue.emit([(self.job.id, self.job.attempt, flat([event]))])
            self.offset += 1

    async def finish(self) -> None:
        text = "".join(WORDS[n % len(WORDS)] for n in range(self.offset))
        ids = tuple(range(self.offset))
        choice = Choice(text=text, token_ids=ids, finish_reason="length")
        assert await self.queue.finish(self.job, [], JobResult(choices=(choice,)))


async def writer_for(lab: Any, **fields: Any) -> Writer:
    queue = await lab.queue("w1")
    await lab.submit(**fields)
    (job,) = await queue.claim(1)
    return Writer(queue, job)


def check(events: list[Event], start: int = 0) -> str:
    """Contiguous, each once, one end, at the end. Returns the text."""
    offset = start
    for event in events:
        assert event.offset == offset
        offset = event.end
    assert [event.final for event in events] == [False] * (len(events) - 1) + [True]
    return "".join(event.text for event in events)


async def collect(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


async def started(stream: AsyncIterator[Event]) -> tuple[list[Event], asyncio.Task[None]]:
    """A task that fills a list, after its first event has come."""
    events: list[Event] = []
    first = asyncio.Event()

    async def fill() -> None:
        async for event in stream:
            events.append(event)
            first.set()

    task = asyncio.create_task(fill())
    await first.wait()
    return events, task


async def listens(lab: Any, job_id: str) -> bool:
    """Whether somebody listens to a job's channel."""
    ((_, count),) = await lab.raw.pubsub_numsub(lab.keys.events(job_id))
    return bool(count)
