"""One worker process's inside over a real server, with an engine that says what the test tells it.

The server is Valkey; each test has a namespace of its own. The scripted engine stands in for the
engine process and for nothing else: it records what it is given and speaks when told to.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.stats import StepStats
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.protocol import Event, JobRequest, JobResult, SamplingParams
from tokenfleet.producer.submission import Submission
from tokenfleet.worker.engine_link.engine_process import Batch, EngineInfo, Refusal, StepEvent
from tokenfleet.worker.queue import JobQueue
from tokenfleet.worker.service import WorkerService
from tokenfleet.worker.settings import load_settings

from ...leftovers import shared

MODEL = "m"
END = 257


class ScriptedEngine:
    """An engine process without a process."""

    def __init__(self, slots: int, start: asyncio.Event | None = None) -> None:
        self.slots = slots
        self.requests: dict[str, EngineRequest] = {}
        """By job id, in the order they came."""
        self.aborted: list[tuple[str, int | None]] = []
        self.last_heard = time.monotonic()
        self.stepped = False
        self.pid = 0
        self._said: asyncio.Queue[Batch | None] = asyncio.Queue()
        self._cause = "stopped"
        self._start = start

    async def start(self) -> EngineInfo:
        if self._start is not None:
            await self._start.wait()
        return EngineInfo(slots=self.slots, max_model_len=1000, imports_s=0.0, model_s=0.0)

    def add(self, request: EngineRequest) -> None:
        self.requests[request.id.rpartition("/")[0]] = request

    def flush(self) -> None:
        """What is added here has arrived."""

    def abort(self, id: str, choice: int | None = None) -> None:
        """As an engine does: one event "cancelled" for each choice that it stops."""
        self.aborted.append((id.rpartition("/")[0], choice))
        request = self.requests.get(id.rpartition("/")[0])
        if request is not None and request.id == id:
            stopped = range(request.params.n) if choice is None else (choice,)
            events = [StepEvent(id, c, [], "cancelled") for c in stopped]
            self._said.put_nowait(Batch(events, [], StepStats(), []))

    @property
    def heard_out(self) -> bool:
        """Whether everything said has been taken."""
        return self._said.empty()

    def say(
        self,
        job_id: str,
        text: str = "",
        reason: str | None = None,
        *,
        choice: int = 0,
        error: str | None = None,
    ) -> None:
        """One step that made the bytes of `text` for one job."""
        self.say_tokens(job_id, list(text.encode()), reason, choice=choice, error=error)

    def say_tokens(
        self,
        job_id: str,
        tokens: list[int],
        reason: str | None = None,
        *,
        choice: int = 0,
        error: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """One step that made these tokens for one job."""
        id = self.requests[job_id].id
        event = StepEvent(id, choice, tokens, reason, error=error, error_code=error_code)
        self.stepped = True
        self.last_heard = time.monotonic()
        self.say_batch(Batch([event], [], StepStats(), []))

    def say_batch(self, batch: Batch) -> None:
        """All that one step made."""
        self._said.put_nowait(batch)

    def refuse(self, job_id: str, code: str, message: str) -> None:
        refusal = Refusal(self.requests[job_id].id, code, message)
        self._said.put_nowait(Batch([], [refusal], None, []))

    def die(self, cause: str = "killed by SIGKILL") -> None:
        self._cause = cause
        self._said.put_nowait(None)

    async def batches(self) -> AsyncIterator[Batch]:
        while (batch := await self._said.get()) is not None:
            yield batch

    async def cause_of_death(self) -> str:
        return self._cause

    async def stop(self) -> None:
        self.die("stopped")

    def tell_where(self) -> None:
        """It has no threads to tell of."""

    async def kill(self) -> int:
        self.die("killed by SIGKILL")
        return -9


class Fleet:
    """Submits to one namespace, starts workers on it, and looks at what is in Redis."""

    def __init__(self, server: EmbeddedServer, model: Path) -> None:
        self.server = server
        self.namespace = f"t{uuid.uuid4().hex[:12]}"
        self.connection = Connection(server.url, namespace=self.namespace)
        self.engines: list[ScriptedEngine] = []
        self.services: list[WorkerService] = []
        self.queues: list[JobQueue] = []
        self.runs: list[asyncio.Task[int]] = []
        self._submission = Submission(self.connection)
        self._model = model
        self.engine_kind: type[ScriptedEngine] = ScriptedEngine
        self.engine_may_start: asyncio.Event | None = None

    @property
    def redis(self) -> Any:
        return self.connection.client

    @property
    def engine(self) -> ScriptedEngine:
        """The engine that was started last."""
        return self.engines[-1]

    def worker(self, *, simulated: bool = False, **settings: Any) -> WorkerService:
        """A worker, running; `simulated`: with an engine process of its own."""
        values = {"max_num_seqs": 2, "prefetch": 0, "flush_interval_ms": 0, **settings}
        service = WorkerService(
            load_settings(
                redis_url=self.server.url,
                namespace=self.namespace,
                model=str(self._model),
                model_name=MODEL,
                **values,
            ),
            make_engine=None if simulated else lambda: self._engine(values["max_num_seqs"]),
        )
        self.services.append(service)
        self.runs.append(asyncio.ensure_future(service.run()))
        return service

    def queue(self, worker_id: str) -> JobQueue:
        """The queue as another worker sees it; closed with the fleet."""
        queue = JobQueue(
            self.server.url, namespace=self.namespace, model_name=MODEL, worker_id=worker_id
        )
        self.queues.append(queue)
        return queue

    def _engine(self, slots: int) -> ScriptedEngine:
        self.engines.append(self.engine_kind(slots, self.engine_may_start))
        return self.engines[-1]

    async def submit(self, prompt: str = "hello", **fields: Any) -> str:
        sampling = SamplingParams(**fields.pop("sampling", {"max_tokens": 100}))
        if "messages" in fields or "prompt_token_ids" in fields:
            request = JobRequest(model=MODEL, sampling=sampling, **fields)
        else:
            request = JobRequest(model=MODEL, prompt=prompt, sampling=sampling, **fields)
        (accepted,) = await self._submission.send([self._submission.draft(request)])
        return accepted.id

    async def field(self, job_id: str, name: str) -> str:
        value = await self.redis.hget(self.connection.keys(0).job(job_id), name)
        return "" if value is None else value.decode()

    async def state(self, job_id: str) -> str:
        return await self.field(job_id, "state")

    async def result(self, job_id: str) -> JobResult:
        packed = await self.redis.hget(self.connection.keys(0).job(job_id), "result")
        return JobResult.unpack(packed)

    async def log(self, job_id: str) -> list[Event]:
        entries = await self.redis.xrange(self.connection.keys(0).events(job_id))
        return [Event.unpack(fields[b"d"]) for _, fields in entries]

    async def text(self, job_id: str) -> str:
        return "".join(event.text for event in await self.log(job_id))

    async def pending(self, worker_id: str | None = None) -> int:
        """Entries held in the group, by one worker or by all."""
        held = 0
        async for key in self.redis.scan_iter(f"{{{self.namespace}:0}}:q:*"):
            info = await self.redis.xpending(key, "workers")
            for consumer in info["consumers"]:
                if worker_id is None or consumer["name"].decode() == worker_id:
                    held += consumer["pending"]
        return held

    async def leases(self) -> list[tuple[str, dict[str, Any]]]:
        """What is held in the group: the queue's key, and what XPENDING says."""
        return [
            (key, held)
            async for key in self.redis.scan_iter(f"{{{self.namespace}:0}}:q:*")
            for held in await self.redis.xpending_range(key, "workers", "-", "+", 10)
        ]

    async def age_leases(self, idle_ms: int) -> None:
        """Make each lease look as if it had been renewed for the last time so long ago."""
        for key, held in await self.leases():
            entry, owner = held["message_id"], held["consumer"]
            await self.redis.xclaim(key, "workers", owner, 0, [entry], idle=idle_ms, justid=True)

    async def end_leases(self) -> None:
        """Let each lease run out, and a reaper see it."""
        await self.age_leases(3_600_000)
        reaper = self.queue("reaper")
        await reaper.ensure()
        await reaper.reclaim()

    async def close(self) -> None:
        for run in self.runs:
            run.cancel()
        await asyncio.gather(*self.runs, return_exceptions=True)
        for queue in self.queues:
            await queue.aclose()
        await self.connection.aclose()

    async def is_(self, job_id: str, state: str) -> bool:
        return await self.state(job_id) == state

    async def shows(self, job_id: str, text: str) -> bool:
        return await self.text(job_id) == text

    async def redis_pending_is(self, count: int) -> bool:
        return await self.pending() == count

    def has(self, *job_ids: str) -> bool:
        """Whether the newest engine was given all these jobs."""
        return bool(self.engines) and all(id in self.engine.requests for id in job_ids)


@pytest.fixture(scope="session")
def byte_model(make_byte_model: Callable[..., Path]) -> Path:
    """A directory with a tokenizer of bytes: id b is byte b; 256 <s>, 257 </s>, 258 <pad>."""
    template = (
        "{% for m in messages %}{% if m['role'] == 'cursed' %}{{ raise_exception('no') }}"
        "{% endif %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    )
    return make_byte_model(("<s>", "</s>", "<pad>"), END, template)


@pytest.fixture(scope="session")
def shared_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with shared(EmbeddedServer(), request.session) as server:
        yield server


@pytest.fixture
async def fleet(shared_server: EmbeddedServer, byte_model: Path) -> AsyncIterator[Fleet]:
    """A namespace of its own on the shared server."""
    fleet = Fleet(shared_server, byte_model)
    yield fleet
    await fleet.close()


@pytest.fixture
def often_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are long enough for any machine, and renewed every half second all the same."""
    monkeypatch.setattr("tokenfleet.worker.lease.RENEWALS_PER_LEASE", 60)


@pytest.fixture
async def own_fleet(tmp_path: Path, byte_model: Path) -> AsyncIterator[Fleet]:
    """A server of its own, with AOF, for tests that stop it."""
    with EmbeddedServer(data_dir=tmp_path) as server:
        fleet = Fleet(server, byte_model)
        yield fleet
        await fleet.close()
