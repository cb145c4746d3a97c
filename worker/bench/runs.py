"""The benches: which engines take turns on which workloads, and what their figures say together.

Engines are compared in one run only, in turns (A B A B): a machine that others use drifts by more
from minute to minute than most differences one wants to see. A ratio is one of medians of the same
run.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tokenfleet.worker.bench.cpu_time import CpuTimes
from tokenfleet.worker.bench.figures import Summary, ratio, turn_by_turn
from tokenfleet.worker.bench.first_token import FirstTokens
from tokenfleet.worker.bench.workloads import Workload, warm_up, workload_s, workload_w

UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Settings of a container that would slow down one of the engines; unset for those under test."""
RATIOS = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "gap_p99_s", "completion_mean_s")
S_BATCH = 4
"""How a static batcher takes S: four jobs at a time."""


class BenchFailed(RuntimeError):
    """An engine under test ended, or said something else than figures."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What is measured, and how often."""

    model: Path
    counts: tuple[int, ...] = (8,)
    """N of workload W, one after the other."""
    workloads: tuple[str, ...] = ("W",)
    repeats: int = 3
    threads: int = 0
    """0: one per core."""
    compare: tuple[str, ...] = ()
    compare_dtype: str = "bfloat16"
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Settings of our engine by name."""
    seed: int = 1
    first_token_s: float = 0.0
    """How long short turns are played for each N of W, through Redis and without; 0: none."""

    @property
    def num_threads(self) -> int:
        return self.threads or os.cpu_count() or 1

    def engine_config(self, slots: int) -> dict[str, Any]:
        """Prefix cache off: the prompts are all different, and stay so when repeated."""
        return {
            "model": str(self.model),
            "max_num_seqs": slots,
            "prefix_cache": False,
            **self.engine,
        }

    def slots(self) -> int:
        asked = [*self.counts] if "W" in self.workloads else []
        return max([*asked, 16 if "S" in self.workloads else 1])

    def plans(self, vocab_size: int) -> list[Callable[[int], Workload]]:
        """One maker of a workload per row of the report; it takes the seed of a repeat."""
        made: list[Callable[[int], Workload]] = []
        if "W" in self.workloads:
            made += [lambda seed, n=n: workload_w(n, vocab_size, seed) for n in self.counts]  # type: ignore[misc]
        if "S" in self.workloads:
            made.append(lambda seed: workload_s(vocab_size, seed))
        return made


class Contender(Protocol):
    """Something that runs a workload and says figures."""

    name: str

    def run(self, workload: Workload) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Program:
    """What serves a workload (worker/bench/line_protocol.py), and the Python that runs it."""

    module: str = "tokenfleet.worker.bench.child"
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the bench's own."""


class Child:
    """An engine in a process of its own."""

    def __init__(
        self, engine: str, options: Mapping[str, Any], threads: int, program: Program | None = None
    ) -> None:
        program = program or Program()
        environment = {k: v for k, v in os.environ.items() if k not in UNSET}
        environment |= {"OMP_NUM_THREADS": str(threads), **program.environment}
        self._process = subprocess.Popen(
            [program.python, "-m", program.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
        )
        try:
            self.facts = self._ask({"engine": engine, "threads": threads, **options})
        except BaseException:
            self._kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, workload: Workload, **options: Any) -> dict[str, float]:
        """Raises BenchFailed when the child ends instead of answering."""
        return self._ask({"run": workload.as_lists(), **options})

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its end says more than ours
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "no answer"}
        if "error" in answer:
            self._process.communicate()
            code = self._process.returncode
            raise BenchFailed(f"an engine under test ended with code {code}: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        """The child, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class EngineContender:
    """An engine that is given all jobs at once and batches them as it likes."""

    def __init__(self, child: Child, name: str = "engine") -> None:
        self._child = child
        self.name = name

    def run(self, workload: Workload) -> dict[str, float]:
        cpu = CpuTimes({"engine": self._child.pid})
        figures = self._child.run(workload)
        return figures | cpu.figures(figures["output_tokens"])


class StaticBatches:
    """transformers in static batches of one size; None: the whole workload at once."""

    def __init__(self, child: Child, batch: int | None) -> None:
        self._child = child
        self._batch = batch
        self.name = f"transformers batch {batch or 'all'}" if batch != 1 else "transformers single"

    def run(self, workload: Workload) -> dict[str, float]:
        return self._child.run(workload, batch=self._batch or len(workload.jobs))


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a bench found; `as_dict` is what --json writes."""

    command: str
    summaries: tuple[Summary, ...]
    baselines: tuple[str, ...]
    """The engines whose figures are divided by those of all the others."""
    facts: Mapping[str, Any]
    complete: bool = True
    """False: more turns were to come."""
    first_tokens: tuple[FirstTokens, ...] = ()
    """Of short turns in pairs."""

    def ratios(self) -> list[dict[str, Any]]:
        """Each baseline over each other engine, workload by workload."""
        ones = [s for s in self.summaries if s.engine in self.baselines]
        others = [s for s in self.summaries if s.engine not in self.baselines]
        return [
            {
                "workload": one.workload,
                "of": one.engine,
                "to": other.engine,
                **{name: ratio(one, other, name) for name in RATIOS if other.middle(name)},
                "turn_by_turn": turn_by_turn(one, other),
            }
            for other in others
            for one in ones
            if one.workload == other.workload
        ]

    def as_dict(self) -> dict[str, Any]:
        first = [found.as_dict() for found in self.first_tokens]
        return {
            "bench": self.command,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "complete": self.complete,
            **self.facts,
            "results": [summary.as_dict() for summary in self.summaries],
            "ratios": self.ratios(),
            **({"first_tokens": first} if first else {}),
        }


Say = Callable[[str], None]
Keep = Callable[[Report], None]
"""Told what is known after each turn: a bench of half an hour may be ended before its end."""


def bench_engine(config: BenchConfig, say: Say, keep: Keep) -> Report:
    """Our engine, and beside it in the same run what it is to be compared with."""
    with ExitStack() as stack:
        say(f"loading {config.model}")
        options = {"config": config.engine_config(config.slots())}
        ours = stack.enter_context(Child("tokenfleet", options, config.num_threads))
        facts = machine_facts(config) | {"engine": ours.facts}
        others: Child | None = None
        if "transformers" in config.compare:
            others = stack.enter_context(
                Child(
                    "transformers", {**options, "dtype": config.compare_dtype}, config.num_threads
                )
            )
            facts["transformers"] = others.facts
        vocab_size = int(ours.facts["vocab_size"])
        ours.run(warm_up(vocab_size))
        if others is not None:
            others.run(warm_up(vocab_size), batch=4)

        def contenders(workload: Workload) -> list[Contender]:
            rivals: list[Contender] = []
            if others is not None:
                sizes: tuple[int | None, ...] = (S_BATCH,) if workload.name == "S" else (1, None)
                rivals = [StaticBatches(others, size) for size in sizes]
            return [EngineContender(ours), *rivals]

        report = partial(Report, "engine", baselines=("engine",), facts=facts)
        return take_turns(config, vocab_size, contenders, say, keep, report)


def take_turns(
    config: BenchConfig,
    vocab_size: int,
    contenders: Callable[[Workload], Sequence[Contender]],
    say: Say,
    keep: Keep,
    report: Callable[..., Report],
) -> Report:
    """Every workload `repeats` times, all contenders after one another in each repeat."""
    before: list[Summary] = []
    for make in config.plans(vocab_size):
        runs: dict[str, list[dict[str, float]]] = {}
        summaries: list[Summary] = []
        for repeat in range(config.repeats):
            workload = make(config.seed + repeat)
            for contender in contenders(workload):
                figures = contender.run(workload)
                _check_complete(contender.name, workload, figures)
                runs.setdefault(contender.name, []).append(figures)
                say(
                    f"{workload.name:7} {repeat + 1}/{config.repeats} {contender.name:24}"
                    f"{figures['tokens_per_s']:8.1f} tok/s"
                )
            summaries = [Summary(name, workload.name, tuple(found)) for name, found in runs.items()]
            keep(report(summaries=(*before, *summaries), complete=False))
        before += summaries
    return report(summaries=tuple(before))


def _check_complete(name: str, workload: Workload, figures: Mapping[str, float]) -> None:
    """A rate counts only when all the work was done."""
    if figures["output_tokens"] != workload.output_tokens:
        raise BenchFailed(
            f"{name} made {figures['output_tokens']:.0f} of {workload.output_tokens} tokens"
        )


def machine_facts(config: BenchConfig) -> dict[str, Any]:
    """What one must know to read the figures."""
    return {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: version_of(name) for name in ("tokenfleet", "torch", "transformers")},
        "model": config.model.name,
        "threads": config.num_threads,
        "settings": dict(config.engine),
        "compare_dtype": config.compare_dtype if config.compare else None,
    }


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def version_of(name: str) -> str | None:
    """Of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
