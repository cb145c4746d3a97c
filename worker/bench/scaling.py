"""How a fixed set of jobs shrinks in time as workers are added, each with a device of its own.

The devices are simulated (a step lasts a fixed time and takes no core), so that what is measured is
the queue: whether every worker always has what to do. The last worker to end decides. Workers,
server and client do share this machine's cores: how busy those were stands beside each time.

Invariant: the time of every number of workers is that of the same jobs, all of them finished.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenfleet.producer import semconv
from tokenfleet.worker.demo.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncClient

MODEL_NAME = "scaling"
STEPS = f"{semconv.STEPS}_total"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Workload:
    """The fixed set, and what the workers are like."""

    jobs: int = 128
    tokens: int = 50
    slots: int = 4
    step_ms: float = 100.0


@dataclass(frozen=True, slots=True)
class Scaled:
    """One number of workers."""

    workers: int
    wall_s: float
    share: float
    """Of the time of the first number."""
    steps: tuple[int, ...]
    """Of each worker's device."""
    cpu_s_per_1000_tokens: float
    """Of a worker and its engine process."""
    workers_busy: float
    """Share of this machine's CPU time that the workers took."""
    machine_busy: float
    """Share of it that all processes took, those of others too."""


async def bench_scaling(
    counts: Sequence[int], workload: Workload, model: Path
) -> list[dict[str, object]]:
    """The same jobs on each number of workers in turn; each row also says what the jobs were.

    Args:
        model: a directory with a tokenizer.
    """
    from tokenfleet.producer import AsyncClient
    from tokenfleet.producer.embedded import EmbeddedServer

    found: list[Scaled] = []
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as logs, EmbeddedServer() as server:
        async with AsyncClient(server.url) as client:
            for count in counts:
                workers = [
                    _worker(f"w{count}-{number}", server.url, model, workload, Path(logs))
                    for number in range(count)
                ]
                first_s = found[0].wall_s if found else None
                found.append(await _run(client, workers, workload, first_s))
    return [asdict(one) | asdict(workload) for one in found]


def _worker(name: str, url: str, model: Path, workload: Workload, logs: Path) -> WorkerProcess:
    settings = {
        "redis_url": url,
        "model": model,
        "model_name": MODEL_NAME,
        "max_num_seqs": workload.slots,
        "prefetch": 0,
        "simulated_step_ms": workload.step_ms,
        "log_level": "warning",
    }
    return WorkerProcess(name, settings, logs / f"{name}.log", {"OMP_NUM_THREADS": "1"})


async def _run(
    client: AsyncClient,
    workers: Sequence[WorkerProcess],
    workload: Workload,
    first_s: float | None,
) -> Scaled:
    from tokenfleet.producer import SamplingParams

    try:
        for worker in workers:
            await worker.start()
        await asyncio.gather(*(worker.ready() for worker in workers))
        before = _cpu(workers)
        started = time.perf_counter()
        sampling = SamplingParams(max_tokens=workload.tokens, ignore_eos=True)
        jobs = await client.submit_many(
            [{"model": MODEL_NAME, "prompt": "x", "sampling": sampling}] * workload.jobs
        )
        await asyncio.gather(*(job.result() for job in jobs))
        wall_s = time.perf_counter() - started
        spent = [after - was for after, was in zip(_cpu(workers), before)]
        steps = [int(await worker.metric(STEPS)) for worker in workers]
    finally:
        await asyncio.gather(*(worker.stop(5.0) for worker in workers))
    ours, busy, there = spent
    return Scaled(
        workers=len(workers),
        wall_s=wall_s,
        share=wall_s / (first_s or wall_s),
        steps=tuple(steps),
        cpu_s_per_1000_tokens=ours / (workload.jobs * workload.tokens) * 1000,
        workers_busy=ours / max(there, 1e-9),
        machine_busy=busy / max(there, 1e-9),
    )


def _cpu(workers: Sequence[WorkerProcess]) -> tuple[float, float, float]:
    """CPU seconds so far: of the workers with their engines, of all processes, and to be had."""
    groups = {worker.pid for worker in workers}
    ours = sum(seconds for group, seconds in _processes() if group in groups)
    first = Path("/proc/stat").read_text().splitlines()[0].split()
    ticks = [int(number) / CLOCK_TICKS for number in first[1:9]]
    idle = ticks[3] + ticks[4]  # idle, iowait
    return ours, sum(ticks) - idle, sum(ticks)


def _processes() -> Iterator[tuple[int, float]]:
    """Process group and CPU seconds of every process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        yield int(fields[2]), (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
