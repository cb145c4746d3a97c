"""The same work through Redis: what the queue, the worker process and the text cost.

Server, worker, subscriber and engine share this machine's cores, as they would not in a fleet; the
ratio to the engine alone is therefore the worst case of it. The subscriber runs on the loop that a
worker and the gateway run on.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tokenfleet.producer import semconv
from tokenfleet.worker.bench.cpu_time import CpuTimes, engine_of
from tokenfleet.worker.bench.figures import Seen, figures_of
from tokenfleet.worker.bench.first_token import Turn, in_pairs, short_w
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
SETTLE_S = 0.05
"""Between two turns: the worker has told Redis of the ends that it was told of."""
STEPS = f"{semconv.STEPS}_total"
Played = TypeVar("Played")
_FIRST_TOKEN = f"{semconv.TIME_TO_FIRST_TOKEN.replace('.', '_')}_seconds"
_WAIT = semconv.QUEUE_WAIT
_WORKERS_PART = (f"{_FIRST_TOKEN}_sum", f"{_WAIT}_sum", f"{_FIRST_TOKEN}_count")


@dataclass(frozen=True, slots=True)
class Streams:
    """Jobs that were submitted together, and what their readers saw."""

    asked_at: float
    asked_ms: float
    """The same moment, by the wall clock."""
    jobs: list[AsyncJob]
    seen: list[Seen]


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
        self._server = server = self._stack.enter_context(EmbeddedServer())
        self._step_log = logs / "steps.jsonl"
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
        before, cpu = self._read(), CpuTimes(self._processes())
        figures = self._runner.run(self._unless_it_ends(self._play(workload)))
        figures |= cpu.figures(figures["output_tokens"])
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

    def _processes(self) -> dict[str, int]:
        """Those whose CPU time is told."""
        server, worker = self._server.pid, self._worker.pid
        assert server is not None
        return {
            "worker": worker, "server": server, "reader": os.getpid(), "engine": engine_of(worker)
        }  # fmt: skip

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
                "step_log": self._step_log,
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

    async def _unless_it_ends(self, playing: Coroutine[Any, Any, Played]) -> Played:
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
        streams = await self._stream(workload)
        submitted = [(await job.status()).submitted_ms for job in streams.jobs]
        # Redis drops what is less than a millisecond
        after_ms = mean(submitted) + 0.5 - streams.asked_ms
        return figures_of(streams.seen) | {"submitted_s": after_ms / 1e3}

    async def _stream(self, workload: Workload) -> Streams:
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
        return Streams(asked_at, asked_ms, jobs, seen)

    def first_tokens(self, workload: Workload) -> Turn:
        """The first tokens of a workload, and when the engine had what to do and what was made."""
        self._runner.run(asyncio.sleep(SETTLE_S))
        noted = self._step_log.stat().st_size
        streams = self._runner.run(self._unless_it_ends(self._stream(workload)))
        shift_s = time.monotonic() - time.perf_counter()
        with self._step_log.open() as log:
            log.seek(noted)
            steps = [json.loads(line) for line in log]
        made = {name.partition("/")[0]: step["made"] for step in steps for name in step["ids"]}
        behind = [
            seen.arrivals[0][0] + shift_s - made[job.id]
            for job, seen in zip(streams.jobs, streams.seen)
        ]
        return Turn(
            ttft_p50_s=figures_of(streams.seen)["ttft_p50_s"],
            until_engine_s=steps[0]["working_since"] - streams.asked_at - shift_s,
            from_engine_s=median(behind),
        )

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
        found = take_turns(config, vocab_size, lambda _: contenders, say, keep, report)
        for make in _short_plans(config, vocab_size):
            keep(replace(found, complete=False))
            pairs = in_pairs(fleet, alone, make, spend_s=config.first_token_s, clock=time.monotonic)
            say(f"{pairs.workload:7} {len(pairs.pairs)} short pairs")
            found = replace(found, first_tokens=(*found.first_tokens, pairs))
        return found


def _short_plans(config: BenchConfig, vocab_size: int) -> list[Callable[[int], Workload]]:
    """One maker of short turns for each N of W; it takes the number of a pair."""
    if "W" not in config.workloads or not config.first_token_s:
        return []
    return [
        lambda number, n=n: short_w(n, vocab_size, config.seed + number)  # type: ignore[misc]
        for n in config.counts
    ]
