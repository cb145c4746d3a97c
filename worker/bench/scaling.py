"""How a fixed set of jobs shrinks in time as workers are added, each with a device of its own.

The devices are simulated (a step lasts a fixed time and takes no core), so that what is measured is
the queue: whether every worker always has what to do. The last worker to end decides.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenfleet.producer import semconv
from tokenfleet.worker.demo.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncClient

MODEL_NAME = "scaling"
STEPS = f"{semconv.STEPS}_total"


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


async def bench_scaling(
    counts: Sequence[int], workload: Workload, model: Path
) -> list[dict[str, object]]:
    """The same jobs on each number of workers in turn.

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
                wall_s, steps = await _run(client, workers, workload)
                share = wall_s / (found[0].wall_s if found else wall_s)
                found.append(Scaled(count, wall_s, share, steps))
    return [asdict(one) for one in found]


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
    client: AsyncClient, workers: Sequence[WorkerProcess], workload: Workload
) -> tuple[float, tuple[int, ...]]:
    from tokenfleet.producer import SamplingParams

    try:
        for worker in workers:
            await worker.start()
        await asyncio.gather(*(worker.ready() for worker in workers))
        started = time.perf_counter()
        sampling = SamplingParams(max_tokens=workload.tokens, ignore_eos=True)
        jobs = await client.submit_many(
            [{"model": MODEL_NAME, "prompt": "x", "sampling": sampling}] * workload.jobs
        )
        await asyncio.gather(*(job.result() for job in jobs))
        wall_s = time.perf_counter() - started
        steps = [int(await worker.metric(STEPS)) for worker in workers]
    finally:
        await asyncio.gather(*(worker.stop(5.0) for worker in workers))
    return wall_s, tuple(steps)
