"""A way in to a Redis, and whole workers on it.

The workers are real, but for an engine that lives in this process and repeats the prompt: every gap
and doublet shows.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.request import EngineRequest
from tokenfleet.producer import AsyncClient, AsyncJob, Event, JobResult, SamplingParams
from tokenfleet.producer.connection import Connection
from tokenfleet.worker.engine_link.engine_process import Batch, EngineInfo, StepEvent
from tokenfleet.worker.engine_link.simulated import SimulatedCore
from tokenfleet.worker.service import WorkerService
from tokenfleet.worker.settings import load_settings

MODEL = "m"
_numbers = itertools.count(1)


class LocalEngine:
    """An engine without a process: SimulatedCore, a step each `step_s`."""

    def __init__(self, slots: int, step_s: float) -> None:
        config = EngineConfig(model=".", max_num_seqs=slots)
        self.core = SimulatedCore(config, step_s, sleep=lambda _: None)
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.last_heard = time.monotonic()
        self.stepped = False
        self.pid = 0
        self.steps = 0
        self._work = asyncio.Event()
        self._over = False

    async def start(self) -> EngineInfo:
        return EngineInfo(self.core.config.max_num_seqs, self.core.max_len, 0.0, 0.0)

    def add(self, request: EngineRequest) -> None:
        self.core.add(request)
        self._work.set()

    def flush(self) -> None:
        """What is added here has arrived."""

    def abort(self, id: str, choice: int | None = None) -> None:
        self.core.abort(id, choice)
        self._work.set()

    async def batches(self) -> AsyncIterator[Batch]:
        while True:
            await self._work.wait()
            await self.may_step.wait()
            if self._over:
                return
            if not self.core.has_work:
                self._work.clear()
                continue
            events = [
                StepEvent(e.id, e.choice, list(e.token_ids), e.finish_reason)
                for e in self.core.step()
            ]
            self.stepped, self.last_heard = True, time.monotonic()
            self.steps += 1
            yield Batch(events, [], self.core.stats, [])
            await asyncio.sleep(self.core.step_s)

    async def cause_of_death(self) -> str:
        return "stopped"

    async def stop(self) -> None:
        self._over = True
        self._work.set()
        self.may_step.set()

    async def kill(self) -> int:
        await self.stop()
        return -9


@dataclass(slots=True)
class Worker:
    """A worker in this process."""

    service: WorkerService
    run: asyncio.Task[int]
    engines: list[LocalEngine]

    @property
    def engine(self) -> LocalEngine:
        return self.engines[-1]

    async def die(self) -> None:
        """End without a word, as a killed process does."""
        self.run.cancel()
        await asyncio.gather(self.run, return_exceptions=True)

    async def drain(self) -> int:
        self.service.drain()
        return await self.run


class Site:
    """One way in, with a namespace of its own."""

    def __init__(
        self,
        url: str,
        model: Path,
        *,
        worker_url: str | None = None,
        our_url: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self.url = url
        self.worker_url = worker_url or url
        self.namespace = namespace or f"s{next(_numbers)}"
        self.connection = Connection(our_url or url, namespace=self.namespace)
        self.client = AsyncClient(
            self.url, namespace=self.namespace, connect_timeout_s=240.0, silence_s=0.5
        )
        self._model = model
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self.connection.aclose)
        self._stack.push_async_callback(self.client.aclose)

    def worker(self, *, step_s: float = 0.002, **settings: Any) -> Worker:
        values = {"max_num_seqs": 8, "prefetch": 0, "flush_interval_ms": 4, "lease_s": 20}
        values |= settings
        engines: list[LocalEngine] = []

        def make_engine() -> Any:
            engines.append(LocalEngine(values["max_num_seqs"], step_s))
            return engines[-1]

        service = WorkerService(
            load_settings(
                redis_url=self.worker_url,
                namespace=self.namespace,
                model=str(self._model),
                model_name=MODEL,
                **values,
            ),
            make_engine=make_engine,
        )
        worker = Worker(service, asyncio.ensure_future(service.run()), engines)
        self._stack.push_async_callback(worker.die)
        return worker

    async def submit(self, prompt: str, max_tokens: int, **fields: Any) -> AsyncJob:
        sampling = SamplingParams(max_tokens=max_tokens, n=fields.pop("n", 1))
        return await self.client.submit(model=MODEL, prompt=prompt, sampling=sampling, **fields)

    async def follow(self, job: AsyncJob) -> list[Event]:
        """To the end, checked against the result."""
        events = [event async for event in job.stream()]
        check_stream(events, await job.result(timeout_s=240))
        return events

    async def pending(self) -> int:
        """Entries left in all queues of all partitions."""
        left = 0
        for partition in range(self.connection.partitions):
            names = self.connection.keys(partition)
            for priority in ("interactive", "default", "batch"):
                for key in (names.queue(MODEL, priority), names.front(MODEL, priority)):
                    left += await self.connection.execute("XLEN", key)
        return left

    async def close(self) -> None:
        await self._stack.aclose()


def check_stream(events: list[Event], result: JobResult) -> None:
    """No gap, no doublet, one end, and the text of the result."""
    offset = 0
    for event in events:
        assert event.offset == offset, (offset, event)
        offset = event.end
    assert [e.final for e in events] == [False] * (len(events) - 1) + [True]
    for number, choice in enumerate(result.choices):
        mine = [e for e in events if e.choice == number]
        assert tuple(t for e in mine for t in e.token_ids) == choice.token_ids
        assert "".join(e.text for e in mine) == choice.text


def repeated(prompt: str, count: int) -> str:
    """What the engine answers."""
    return (prompt * (count // len(prompt) + 1))[:count]
