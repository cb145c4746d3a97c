"""The demo: eight jobs over two workers, one of which is killed in the middle of its sentences.

Nothing is staged. The queue, the model, the kill and the takeover are what a fleet does anyway; the
demo only watches, counts, and compares each stream with its job's result. It ends by itself, and
takes every process that it started with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import trace

from tokenfleet.worker.demo.view import View
from tokenfleet.worker.demo.watched import Watched
from tokenfleet.worker.demo.worker_process import WorkerDied, WorkerProcess

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncClient, Event
    from tokenfleet.worker.observing.exporters import Exporters

MODEL_NAME = "smollm2"
SLOTS = 6
"""Per worker; fewer than there are jobs, so that both workers have some."""
LEASE_S = 2.0
"""How long the killed worker's jobs wait before they move on."""
KILL_AFTER_TOKENS = 30
"""The worker that dies has at least two jobs that are this far."""
ARRIVAL_S = 0.4
EARLY_JOBS = 2
"""Submitted at once, for the worker that is up first; the others wait for both workers."""

PROMPTS: tuple[tuple[str, int], ...] = (
    ("Tell me a short story about a lighthouse keeper.", 160),
    ("Write a haiku about rivers.", 32),
    ("What can one do with a paper clip?", 110),
    ("Explain to a child what a queue is.", 90),
    ("Describe the smell of rain.", 60),
    ("Give me three tips for learning to cook.", 140),
    ("Why is the sky blue?", 80),
    ("Write a letter from a cat to its owner.", 160),
)


def exit_code(jobs: Sequence[Watched]) -> int:
    """0 when every stream was whole and equals its result, 1 otherwise."""
    return 1 if any(job.faults or job.ended_at is None for job in jobs) else 0


def worth_a_kill(
    running: Sequence[Watched], prompts: Sequence[tuple[str, int]], *, all_there: bool
) -> bool:
    """Whether two jobs of a worker are far enough to be taken over in the middle.

    That waits for the last submission, but not too long where this process gets little time: until
    two are past half of what they may make.
    """
    far = [job for job in running if len(job.token_ids) >= KILL_AFTER_TOKENS]
    late = [job for job in far if 2 * len(job.token_ids) > prompts[job.number - 1][1]]
    return len(far if all_there else late) >= 2


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What the demo runs with."""

    trace_dir: Path
    """Spans and the workers' logs are written here."""
    prompts: Sequence[tuple[str, int]] = PROMPTS
    kill: bool = True
    simulated_step_ms: float | None = None
    """Test hook: no model is computed, a step lasts this long."""


class Demo:
    """Runs the demo once. `run` returns the exit code."""

    def __init__(self, config: DemoConfig, view: View) -> None:
        self._config = config
        self._view = view
        self._started = time.monotonic()
        self._files = config.trace_dir / time.strftime("demo-%Y%m%d-%H%M%S")
        self._trace_file = self._files.with_suffix(".jsonl")
        self._jobs = [Watched(n, prompt) for n, (prompt, _) in enumerate(config.prompts, start=1)]
        self._workers: dict[str, WorkerProcess] = {}
        self._all_ready = asyncio.Event()

    async def run(self) -> int:
        """The exit code; every process that was started has ended by then."""
        async with AsyncExitStack() as stack:
            await self._run_in(stack)
        return exit_code(self._jobs)

    async def _run_in(self, stack: AsyncExitStack) -> None:
        from tokenfleet.producer import AsyncClient
        from tokenfleet.producer.embedded import EmbeddedServer
        from tokenfleet.worker.demo.model import prepare_smollm2
        from tokenfleet.worker.observing.exporters import ExportConfig, Exporters

        exporters = Exporters(ExportConfig(service="demo-producer", trace_file=self._trace_file))
        stack.callback(exporters.shutdown, 2.0)
        trace.set_tracer_provider(exporters.tracer_provider)
        model = await asyncio.to_thread(prepare_smollm2)
        server = stack.enter_context(EmbeddedServer())
        self._say(f"embedded server at {server.url}")
        for name in ("worker-1", "worker-2"):
            await self._start_worker(stack, name, server.url, model)
        client = await stack.enter_async_context(AsyncClient(server.url, tenant="demo"))
        with self._view.shown(self._jobs, self._elapsed):
            await self._play(client, exporters)
        self._view.finish(self._jobs, self._trace_file, self._elapsed())

    async def _start_worker(self, stack: AsyncExitStack, name: str, url: str, model: Path) -> None:
        worker = WorkerProcess(
            name,
            {
                "redis_url": url,
                "model": model,
                "model_name": MODEL_NAME,
                "max_num_seqs": SLOTS,
                "max_model_len": 1024,
                "lease_s": LEASE_S,
                "grace_s": 0,
                "prefetch": 0,
                "trace_file": self._trace_file,
                "simulated_step_ms": self._config.simulated_step_ms,
            },
            self._files.with_name(f"{self._files.name}-{name}.log"),
            environment={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))},
        )
        stack.push_async_callback(worker.stop, 30.0)
        await worker.start()
        self._workers[name] = worker
        self._say(f"{name} started (pid {worker.pid})")

    async def _play(self, client: AsyncClient, exporters: Exporters) -> None:
        """Submit one after the other, follow all at once, and kill a worker meanwhile."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_workers())
            group.create_task(self._await_workers())
            if self._config.kill:
                group.create_task(self._kill_one())
            followers = []
            for job, (prompt, max_tokens) in zip(self._jobs, self._config.prompts, strict=True):
                if job.number > EARLY_JOBS:
                    await self._all_ready.wait()
                await self._submit(client, exporters, job, prompt, max_tokens)
                followers.append(group.create_task(self._follow(job)))
                await asyncio.sleep(ARRIVAL_S)
            await asyncio.wait(followers)
            watching.cancel()

    async def _submit(
        self, client: AsyncClient, exporters: Exporters, job: Watched, prompt: str, max_tokens: int
    ) -> None:
        from tokenfleet.producer import SamplingParams

        tracer = exporters.tracer_provider.get_tracer("tokenfleet.demo")
        with tracer.start_as_current_span(f"demo job {job.number}") as span:
            job.trace_id = f"{span.get_span_context().trace_id:032x}"
            job.submitted_at = time.monotonic()
            job.job = await client.submit(
                model=MODEL_NAME,
                messages=[{"role": "user", "content": prompt}],
                sampling=SamplingParams(
                    max_tokens=max_tokens,
                    temperature=0.6,
                    top_p=0.9,
                    repetition_penalty=1.1,
                    seed=job.number,
                ),
                priority="interactive",
            )
        self._view.submitted(job)

    async def _follow(self, job: Watched) -> None:
        assert job.job is not None
        async for event in job.job.stream():
            if event.attempt != job.attempt and event.attempt > 0:
                await self._new_attempt(job, event)
            job.take(event, time.monotonic())
            self._view.event(job, event)
        result = await job.job.result(timeout_s=30)
        if list(result.token_ids) != job.token_ids or result.text != job.text:
            job.faults.append(
                f"the stream has {len(job.token_ids)} tokens, the result {len(result.token_ids)}"
            )

    async def _new_attempt(self, job: Watched, event: Event) -> None:
        assert job.job is not None
        status = await job.job.status()
        before, job.attempt = job.attempt, event.attempt
        if status.owner:
            job.workers.append(status.owner)
        if before:
            job.resumed_at = event.offset
            self._view.resumed(job)

    async def _await_workers(self) -> None:
        async def one(worker: WorkerProcess) -> None:
            await worker.ready()
            self._say(f"{worker.name} is ready")

        await asyncio.gather(*(one(worker) for worker in self._workers.values()))
        self._all_ready.set()

    async def _kill_one(self) -> None:
        """SIGKILL a worker in the middle of its jobs' text, once the other can take them over."""
        await self._all_ready.wait()
        while (victim := self._victim()) is None:
            if all(job.ended_at is not None for job in self._jobs):
                self._say("no worker was killed: no two jobs of one were far enough in time")
                return
            await asyncio.sleep(0.02)
        hit = self._running_on(victim.name)
        await victim.kill()
        self._view.killed(victim.name, victim.pid, hit)

    def _victim(self) -> WorkerProcess | None:
        """The worker with the most jobs, once its death would show something."""
        name = max(self._workers, key=lambda one: len(self._running_on(one)))
        all_there = all(job.job is not None for job in self._jobs)
        ripe = worth_a_kill(self._running_on(name), self._config.prompts, all_there=all_there)
        return self._workers[name] if ripe else None

    def _running_on(self, name: str) -> list[Watched]:
        return [job for job in self._jobs if job.running and job.workers[-1:] == [name]]

    async def _watch_workers(self) -> None:
        """End the demo when nobody is left to run its jobs."""
        await asyncio.gather(*(worker.ended() for worker in self._workers.values()))
        raise WorkerDied("\n".join(f"{w.name}: {w.last_lines()}" for w in self._workers.values()))

    def _say(self, text: str) -> None:
        self._view.say(text, self._elapsed())

    def _elapsed(self) -> float:
        return time.monotonic() - self._started


async def run_demo(config: DemoConfig, view: View) -> int:
    """The demo as a command: Ctrl-C and SIGTERM end it cleanly, with code 130."""
    from tokenfleet.producer import TokenfleetError

    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, main.cancel)
    code = 1
    try:
        code = await Demo(config, view).run()
    except* asyncio.CancelledError:
        code = 130
    except* (TokenfleetError, WorkerDied) as failed:
        for error in failed.exceptions:
            view.say(f"FAILED: {error}", 0.0)
    return code
