"""What the queue costs, without an engine: jobs submitted, events emitted, and beside them XADD.

One client process, on the event loop that workers use, and one server on this machine. The server's
cost is the CPU time that it says it used; the client's is that of this process. For a flush it is
all that a worker does (flush.py): `packing` (entries made from drafts, and what was logged noted),
`sending` (the queue's call), and `client` the two together. Everything is repeated in turns, as
machines drift.

Invariant: a rate counts only when Redis holds what was to be done: every job, every token.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.protocol import SamplingParams
from tokenfleet.worker.bench.flush import TOKENS, TimedQueue, flushing
from tokenfleet.worker.bench.runs import BenchFailed, Say, processor, version_of
from tokenfleet.worker.loops import fastest_loop

MODEL = "bench"
RUNNING = 256
"""Jobs whose events one flush takes along."""
BATCH = 2_500
"""Jobs of one submit_many."""
XADD = ("XADD", "tokenfleet-bench", "*", "j", "0199c2f0-2b7e-7c61-9d3c-0a4b5c6d7e8f.0")
"""The command beside which the figures stand: an entry as a queue has it."""


@dataclass(frozen=True, slots=True)
class QueueBench:
    """How much is measured."""

    jobs: int = 10_000
    """At least RUNNING."""
    flushes: int = 100
    repeats: int = 3
    server: Path | None = None
    """Another server's executable; the embedded one otherwise."""


@dataclass(slots=True)
class Cost:
    """What a piece of work took."""

    wall_s: float
    client_s: float
    """CPU time of this process."""
    server_s: float
    """CPU time of the server."""


@dataclass(slots=True)
class Series:
    """The repeats of one figure."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **figures: float | None) -> None:
        for name, value in figures.items():
            if value is not None:
                self.values.setdefault(name, []).append(value)

    def as_dict(self) -> dict[str, Any]:
        """Per figure its median and span."""
        return {
            name: {"median": median(found), "low": min(found), "high": max(found)}
            for name, found in self.values.items()
        }

    def middle(self, name: str) -> float | None:
        found = self.values.get(name)
        return median(found) if found else None


def bench_queue(config: QueueBench, say: Say) -> dict[str, Any]:
    """Measure, and return everything found. Raises BenchFailed when something was not done."""
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        return runner.run(_bench(config, say))


async def _bench(config: QueueBench, say: Say) -> dict[str, Any]:
    series = Series()
    with EmbeddedServer(binary=config.server) as server:
        for repeat in range(config.repeats):
            async with AsyncClient(server.url, namespace=f"bench{repeat}") as client:
                series.add(**await _submitting(client, config.jobs))
                series.add(**await _emitting(server, client, config.flushes))
            for name, pipeline in (("xadd_per_s", 1), ("xadd_pipelined_per_s", 128)):
                series.add(**{name: await asyncio.to_thread(_xadd, server, pipeline)})
            say(f"{repeat + 1}/{config.repeats} done")
        facts = await _facts(server)
    return {
        "bench": "queue",
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **facts,
        "jobs": config.jobs,
        "running": RUNNING,
        "tokens_per_emit": TOKENS,
        "results": series.as_dict(),
        "ratios": _ratios(series),
    }


async def _submitting(client: AsyncClient, count: int) -> dict[str, float]:
    sampling = SamplingParams(max_tokens=64, temperature=0.0)
    jobs: list[Mapping[str, Any]] = [
        {"model": MODEL, "prompt": f"question {number}", "sampling": sampling}
        for number in range(count)
    ]
    await client.submit_many(jobs[:RUNNING])  # scripts are loaded, connections made
    cost = await _cost(client, lambda: _submit(client, jobs))
    names = client.link.connection.keys(0)
    held = await client.link.connection.execute("ZCARD", names.live(MODEL))
    if held != count + RUNNING:
        raise BenchFailed(f"Redis holds {held} of {count + RUNNING} jobs")
    return {
        "jobs_per_s": count / cost.wall_s,
        "client_us_per_job": cost.client_s / count * 1e6,
        "server_us_per_job": cost.server_s / count * 1e6,
    }


async def _submit(client: AsyncClient, jobs: list[Mapping[str, Any]]) -> None:
    for start in range(0, len(jobs), BATCH):
        await client.submit_many(jobs[start : start + BATCH])


async def _emitting(server: EmbeddedServer, client: AsyncClient, flushes: int) -> dict[str, float]:
    async with _queue(server, client) as queue:
        jobs = await queue.claim(RUNNING)
        figures = await flushing(queue, jobs, flushes, lambda: _server_cpu_s(client))
    names = client.link.connection.keys(0)
    logged = await client.link.connection.execute("HGET", names.job(jobs[-1].id), "offset")
    if int(logged) != TOKENS * (flushes + 1):
        raise BenchFailed(f"the log holds {int(logged)} of {TOKENS * (flushes + 1)} tokens")
    return figures


@asynccontextmanager
async def _queue(server: EmbeddedServer, client: AsyncClient) -> AsyncIterator[TimedQueue]:
    namespace = client.link.connection.namespace
    queue = TimedQueue(server.url, namespace=namespace, model_name=MODEL, worker_id="bench")
    try:
        await queue.ensure()
        yield queue
    finally:
        await queue.aclose()


async def _cost(client: AsyncClient, work: Callable[[], Awaitable[None]]) -> Cost:
    server_s, client_s, began = await _server_cpu_s(client), time.process_time(), time.monotonic()
    await work()
    cost = Cost(time.monotonic() - began, time.process_time() - client_s, 0.0)
    cost.server_s = await _server_cpu_s(client) - server_s
    return cost


async def _server_cpu_s(client: AsyncClient) -> float:
    found = await client.link.connection.client.info("cpu")
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


def _xadd(server: EmbeddedServer, pipeline: int) -> float | None:
    """Entries per second of redis-benchmark with 50 connections; None where it is not installed."""
    program = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
    if program is None:
        return None
    command = [program, "-p", str(server.port), "-n", "50000", "-P", str(pipeline), "--csv", *XADD]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(said.stdout.strip().splitlines()[-1].split(",")[1].strip('"'))


def _ratios(series: Series) -> dict[str, float]:
    """Our rates over those of XADD in the same run."""
    found = {}
    for ours in ("jobs_per_s", "emits_per_s"):
        for theirs in ("xadd_per_s", "xadd_pipelined_per_s"):
            one, other = series.middle(ours), series.middle(theirs)
            if one is not None and other:
                found[f"{ours.removesuffix('_per_s')}/{theirs.removesuffix('_per_s')}"] = (
                    one / other
                )
    return found


async def _facts(server: EmbeddedServer) -> dict[str, Any]:
    async with AsyncClient(server.url) as client:
        said = await client.link.connection.client.info("server")
    name = said.get("server_name", "redis")
    return {
        "server": f"{name} {said.get('valkey_version') or said['redis_version']}",
        "processor": processor(),
        "versions": {name: version_of(name) for name in ("tokenfleet", "redis", "hiredis")},
    }
