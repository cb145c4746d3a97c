"""What a collector that never answers costs: the same jobs without it and with it, in turns.

Two workers with simulated devices stand side by side for the whole run, one that exports nothing
and one whose spans and metrics go to a socket that takes them and never says a word. A set of jobs
is given to the one, then to the other, again and again: the machine drifts, the ratio does not.

Invariant: a run counts only when every job brought all of its tokens and both workers ended by
themselves, with exit code 0.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tokenfleet.worker.bench.runs import BenchFailed, Say
from tokenfleet.worker.demo.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncClient

HOST = "127.0.0.1"
ALONE, BLACK_HOLE = "alone", "black_hole"
WARM_UP_JOBS = 4
PATIENCE_S = 60.0
"""How much longer than its grace time a worker may take before it is killed."""


@dataclass(frozen=True, slots=True)
class TelemetryBench:
    """What is measured.

    model: for its tokenizer only.
    """

    model: Path
    jobs: int = 128
    """Of a set; each makes its own spans."""
    tokens: int = 40
    slots: int = 16
    step_ms: float = 5.0
    protocol: str = "grpc"
    grace_s: float = 10.0
    repeats: int = 5
    """Sets for each worker."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One set on one worker."""

    tokens_per_s: float
    cpu_us_per_token: float
    """CPU time of the worker process, its exporting threads included."""


def bench_telemetry(config: TelemetryBench, say: Say) -> dict[str, Any]:
    """Run it; the figures. Raises BenchFailed when a job or a worker did not end as it should."""
    return asyncio.run(_bench(config, say))


async def _bench(config: TelemetryBench, say: Say) -> dict[str, Any]:
    from tokenfleet.producer import AsyncClient
    from tokenfleet.producer.embedded import EmbeddedServer

    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as logs, EmbeddedServer() as server:
        async with _black_hole() as endpoint, AsyncClient(server.url) as client:
            workers = {
                ALONE: _worker(ALONE, config, server.url, Path(logs)),
                BLACK_HOLE: _worker(BLACK_HOLE, config, server.url, Path(logs), endpoint),
            }
            try:
                for worker in workers.values():
                    await worker.start()
                await asyncio.gather(*(worker.ready() for worker in workers.values()))
                rounds = await _rounds(config, client, workers, say)
                exits = {
                    name: await _exit(config, client, name, worker)
                    for name, worker in workers.items()
                }
            finally:
                await asyncio.gather(*(worker.stop(0.0) for worker in workers.values()))
    return _figures(config, rounds, exits)


@asynccontextmanager
async def _black_hole() -> AsyncIterator[str]:
    """The URL of a collector that takes what it is sent and never answers."""
    holes: set[asyncio.Task[Any]] = set()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        holes.add(task)
        try:
            while await reader.read(1 << 16):
                pass
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            holes.discard(task)

    server = await asyncio.start_server(swallow, HOST, 0)
    try:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in set(holes):
            task.cancel()
        await asyncio.gather(*holes, return_exceptions=True)


def _worker(
    name: str, config: TelemetryBench, url: str, logs: Path, endpoint: str | None = None
) -> WorkerProcess:
    settings = {
        "redis_url": url,
        "model": config.model,
        "model_name": name,
        "max_num_seqs": config.slots,
        "simulated_step_ms": config.step_ms,
        "grace_s": config.grace_s,
        "log_level": "error",
        "otlp_endpoint": endpoint,
        "otlp_protocol": config.protocol,
    }
    return WorkerProcess(name, settings, logs / f"{name}.log", {"OMP_NUM_THREADS": "1"})


async def _rounds(
    config: TelemetryBench, client: AsyncClient, workers: Mapping[str, WorkerProcess], say: Say
) -> dict[str, list[Ran]]:
    for name in workers:
        await _set(client, name, WARM_UP_JOBS, config.tokens)
    found: dict[str, list[Ran]] = {name: [] for name in workers}
    for number in range(config.repeats):
        for name, worker in workers.items():
            ran = await _measured(config, client, name, worker)
            found[name].append(ran)
            say(f"round {number + 1}, {name}: {ran.tokens_per_s:.0f} tokens/s")
    return found


async def _measured(
    config: TelemetryBench, client: AsyncClient, name: str, worker: WorkerProcess
) -> Ran:
    cpu, began = _cpu_s(worker.pid), time.perf_counter()
    await _set(client, name, config.jobs, config.tokens)
    wall = time.perf_counter() - began
    tokens = config.jobs * config.tokens
    return Ran(tokens / wall, (_cpu_s(worker.pid) - cpu) / tokens * 1e6)


async def _set(client: AsyncClient, name: str, jobs: int, tokens: int) -> None:
    from tokenfleet.producer import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    given = await client.submit_many(
        [{"model": name, "prompt": "x", "sampling": sampling, "priority": "interactive"}] * jobs
    )
    for result in await asyncio.gather(*(job.result() for job in given)):
        if result.usage.completion_tokens != tokens:
            raise BenchFailed(f"a job of {tokens} tokens ended after {result.usage}")


async def _exit(
    config: TelemetryBench, client: AsyncClient, name: str, worker: WorkerProcess
) -> float:
    """Seconds from SIGTERM to the end of a worker that has just served and has spans to send."""
    await _set(client, name, config.slots, config.tokens)
    began = time.perf_counter()
    code = await worker.stop(config.grace_s + PATIENCE_S)
    took = time.perf_counter() - began
    if code != 0:
        raise BenchFailed(f"worker {name} ended with {code}:\n{worker.last_lines()}")
    return took


def _cpu_s(pid: int) -> float:
    """User and system time of a process, from Linux's /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _figures(
    config: TelemetryBench, found: Mapping[str, list[Ran]], exits: Mapping[str, float]
) -> dict[str, Any]:
    ways: dict[str, dict[str, float]] = {}
    for name, runs in found.items():
        paces = [run.tokens_per_s for run in runs]
        ways[name] = {
            "tokens_per_s": median(paces),
            "lowest": min(paces),
            "highest": max(paces),
            "cpu_us_per_token": median(run.cpu_us_per_token for run in runs),
            "exit_s": exits[name],
        }
    # a pair ran back to back: its ratio holds less of the machine's drift than that of medians
    pairs = [
        hole.tokens_per_s / alone.tokens_per_s
        for alone, hole in zip(found[ALONE], found[BLACK_HOLE])
    ]
    return {
        "bench": "telemetry",
        "jobs": config.jobs,
        "tokens": config.tokens,
        "slots": config.slots,
        "step_ms": config.step_ms,
        "protocol": config.protocol,
        "grace_s": config.grace_s,
        "repeats": config.repeats,
        "ways": ways,
        "throughput_ratio": ways[BLACK_HOLE]["tokens_per_s"] / ways[ALONE]["tokens_per_s"],
        "pair_ratio": {"median": median(pairs), "lowest": min(pairs), "highest": max(pairs)},
        "exit_within_grace": ways[BLACK_HOLE]["exit_s"] <= config.grace_s,
    }
