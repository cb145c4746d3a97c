"""The same work through Redis: what the queue, the worker process and the text cost.

Server, worker, subscriber and engine share this machine's cores, as they would not in a fleet; the
ratio to the engine alone is therefore the worst case of it. The subscriber runs on the loop that a
worker and the gateway run on.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tokenfleet.producer import semconv
from tokenfleet.worker.bench.figures import Seen, figures_of
from tokenfleet.worker.bench.memory import peak_rss_of_group
from tokenfleet.worker.bench.runs import (
    UNSET,
    BenchConfig,
    BenchFailed,
    Child,
    Contender,
    EngineContender,
    Keep,
    Report,
    Say,
    machine_facts,
    take_turns,
)
from tokenfleet.worker.bench.workloads import Workload, warm_up
from tokenfleet.worker.demo.worker_process import WorkerDied, WorkerProcess
from tokenfleet.worker.loops import fastest_loop

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncClient, AsyncJob
    from tokenfleet.producer.embedded import EmbeddedServer

MODEL_NAME = "bench"
STEPS = f"{semconv.STEPS}_total"
_FIRST_TOKEN = f"{semconv.TIME_TO_FIRST_TOKEN.replace('.', '_')}_seconds"
_WAIT = semconv.QUEUE_WAIT
_WORKERS_PART = (f"{_FIRST_TOKEN}_sum", f"{_WAIT}_sum", f"{_FIRST_TOKEN}_count")


class FleetContender:
    """One worker process behind an embedded server, and a client in this process."""

    name = "fleet"

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        self._runner = asyncio.Runner(loop_factory=fastest_loop())
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from tokenfleet.producer.embedded import EmbeddedServer

        logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenfleet-")))
        server = self._stack.enter_context(EmbeddedServer())
        self._worker = self._make_worker(server, logs)
        try:
            self._client = self._runner.run(self._open(server))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            if isinstance(error, WorkerDied):
                raise BenchFailed(str(error)) from None
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runner.run(self._close())
        self._runner.close()
        self._stack.close()

    def run(self, workload: Workload) -> dict[str, float]:
        before = self._read()
        figures = self._runner.run(self._unless_it_ends(self._play(workload)))
        steps, first, waited, jobs = (now - was for now, was in zip(self._read(), before))
        jobs = max(1.0, jobs)
        outside_s = figures["ttft_mean_s"] - (first - waited) / jobs
        claimed_s = figures.pop("submitted_s") + waited / jobs
        return figures | {
            "steps": steps,
            "mean_batch": figures["output_tokens"] / max(1.0, steps),
            "ttft_outside_worker_s": outside_s,
            "ttft_until_claimed_s": claimed_s,
            "ttft_from_worker_s": outside_s - claimed_s,
            "peak_rss_bytes": float(peak_rss_of_group(self._worker.pid)),
        }

    def _read(self) -> list[float]:
        """Steps; of all jobs the seconds from submission to first token and to the claim; jobs."""
        names = (STEPS, *_WORKERS_PART)
        return [self._runner.run(self._worker.metric(name)) for name in names]

    def _make_worker(self, server: EmbeddedServer, logs: Path) -> WorkerProcess:
        slots = self._config.slots()
        settings = self._config.engine_config(slots)
        return WorkerProcess(
            "bench-1",
            {
                **settings,
                "redis_url": server.url,
                "model_name": MODEL_NAME,
                "grace_s": 0,
                "log_level": "warning",
            },
            logs / "worker.log",
            environment={
                **dict.fromkeys(UNSET),
                "OMP_NUM_THREADS": str(self._config.num_threads),
            },
        )

    async def _open(self, server: EmbeddedServer) -> AsyncClient:
        from tokenfleet.producer import AsyncClient

        await self._worker.start()
        await self._worker.ready()
        return await AsyncClient(server.url).__aenter__()

    async def _close(self) -> None:
        if hasattr(self, "_client"):
            await self._client.__aexit__(None, None, None)
        await self._worker.stop(3.0)

    async def _unless_it_ends(
        self, playing: Coroutine[Any, Any, dict[str, float]]
    ) -> dict[str, float]:
        """What is played, for as long as the worker lives: its jobs would wait for another one."""
        play = asyncio.ensure_future(playing)
        end = asyncio.ensure_future(self._worker.ended())
        try:
            await asyncio.wait((play, end), return_when=asyncio.FIRST_COMPLETED)
            if not play.done():
                raise BenchFailed(
                    f"the worker ended with code {end.result()}:\n{self._worker.last_lines()}"
                )
            return play.result()
        finally:
            play.cancel()
            end.cancel()
            await asyncio.gather(play, end, return_exceptions=True)

    async def _play(self, workload: Workload) -> dict[str, float]:
        from tokenfleet.producer import SamplingParams

        asked_at, asked_ms = time.perf_counter(), time.time() * 1e3
        jobs = await self._client.submit_many(
            [
                {
                    "model": MODEL_NAME,
                    "prompt_token_ids": list(job.prompt),
                    "sampling": SamplingParams(
                        max_tokens=job.output, temperature=0.0, ignore_eos=True
                    ),
                }
                for job in workload.jobs
            ]
        )
        seen = await asyncio.gather(*(self._follow(job, asked_at) for job in jobs))
        submitted = [(await job.status()).submitted_ms for job in jobs]
        after_ms = mean(submitted) + 0.5 - asked_ms  # Redis drops what is less than a millisecond
        return figures_of(seen) | {"submitted_s": after_ms / 1e3}

    async def _follow(self, job: AsyncJob, asked_at: float) -> Seen:
        seen = Seen(asked_at)
        async for event in job.stream():
            seen.tokens(time.perf_counter(), len(event.token_ids))
            if event.error is not None:
                raise BenchFailed(f"a job failed: {event.error.message}")
        return seen


def bench_fleet(config: BenchConfig, say: Say, keep: Keep) -> Report:
    """The fleet and the engine alone in turns; the ratio says what Redis and text cost."""
    with ExitStack() as stack:
        say(f"loading {config.model}, twice")
        options: dict[str, Any] = {"config": config.engine_config(config.slots())}
        alone = stack.enter_context(Child("tokenfleet", options, config.num_threads))
        fleet = stack.enter_context(FleetContender(config))
        vocab_size = int(alone.facts["vocab_size"])
        contenders: list[Contender] = [fleet, EngineContender(alone)]
        for contender in contenders:
            contender.run(warm_up(vocab_size))
        facts = machine_facts(config) | {"engine": alone.facts}
        report = partial(Report, "fleet", baselines=("fleet",), facts=facts)
        return take_turns(config, vocab_size, lambda _: contenders, say, keep, report)
