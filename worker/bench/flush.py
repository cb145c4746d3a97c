"""What a flush costs a worker: from the tokens in its jobs' drafts until Redis's answer is handled.

It is the worker's own publisher that flushes jobs of its own kind; only the engine is missing, and
putting the tokens into the drafts is not counted. The jobs have one choice, no logprobs, and do not
end meanwhile.

Invariant: every figure is of the same flushes, and Redis has all tokens of them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn

from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.text import TextDelta
from tokenfleet.worker.bench.runs import BenchFailed
from tokenfleet.worker.broker import Broker
from tokenfleet.worker.claims import ClaimedJob
from tokenfleet.worker.engine_link.engine_process import StepEvent
from tokenfleet.worker.jobs import Job, Stage
from tokenfleet.worker.publisher import Publisher
from tokenfleet.worker.queue import Emission, EmitOutcome, JobQueue

TOKENS = 8
"""Tokens that each job has made since the last flush."""
TEXT = " a few words of text as tokens give i"
"""Of all of them together, with a figure behind it."""


class TimedQueue(JobQueue):
    """Counts the CPU time that this process spends in emit, waiting for others' not included."""

    sending_s = 0.0

    async def emit(self, emissions: list[Emission]) -> EmitOutcome:
        began = time.process_time()
        try:
            return await super().emit(emissions)
        finally:
            self.sending_s += time.process_time() - began


async def flushing(
    queue: TimedQueue,
    claimed: Sequence[ClaimedJob],
    flushes: int,
    server_cpu_s: Callable[[], Awaitable[float]],
) -> dict[str, float]:
    """Flush TOKENS of each job `flushes` times, and once before."""
    publisher = Publisher(queue, Broker(), _Nobody(), flush_interval_s=0.0, flushed=_unheard)
    jobs = [_running(job) for job in claimed]
    _make(jobs, publisher)
    await publisher.flush()  # the script is loaded, the connection made
    client_s = wall_s = queue.sending_s = 0.0
    server_s = await server_cpu_s()
    for _ in range(flushes):
        _make(jobs, publisher)
        began, cpu_s = time.monotonic(), time.process_time()
        if not await publisher.flush():
            raise BenchFailed("Redis was not reached")
        client_s += time.process_time() - cpu_s
        wall_s += time.monotonic() - began
    server_s = await server_cpu_s() - server_s
    return {
        "emits_per_s": len(jobs) * flushes / wall_s,
        "packing_ms_per_flush": (client_s - queue.sending_s) / flushes * 1e3,
        "sending_ms_per_flush": queue.sending_s / flushes * 1e3,
        "client_ms_per_flush": client_s / flushes * 1e3,
        "server_ms_per_flush": server_s / flushes * 1e3,
    }


class _Words:
    """A choice's text, each time another string, as tokens give it."""

    def push(self, token_ids: Sequence[int], *, ended: bool) -> TextDelta:
        return TextDelta(f"{TEXT}{token_ids[0] % 10}", None, len(token_ids))


class _Nobody:
    """Who acts on what a flush finds out; here it finds nothing."""

    def __getattr__(self, what: str) -> Callable[..., NoReturn]:
        def refuse(job: Job, *_: Any) -> NoReturn:
            raise BenchFailed(f"Redis said of job {job.id}: {what}")

        return refuse


def _running(claimed: ClaimedJob) -> Job:
    job = Job(claimed)
    job.prepared(EngineRequest(job.engine_id, [1]), job.replayed([_Words()]))
    job.ready()
    job.move(Stage.RUNNING)
    return job


def _make(jobs: Sequence[Job], publisher: Publisher) -> None:
    """What an engine makes between two flushes."""
    for job in jobs:
        start = 1000 + len(job.choices[0].token_ids)
        job.apply(StepEvent(job.engine_id, 0, list(range(start, start + TOKENS))))
        publisher.touch(job)


def _unheard(_flush_s: float) -> None:
    """How long a flush took is measured here."""
