"""`tokenfleet bench engine|fleet`: figures of this machine, as a table or as JSON."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output, OutputOption

if TYPE_CHECKING:
    from tokenfleet.worker.bench.figures import Summary
    from tokenfleet.worker.bench.runs import BenchConfig, Keep, Report, Say


class WorkloadName(StrEnum):
    W = "W"
    S = "S"


class Peer(StrEnum):
    TRANSFORMERS = "transformers"


class DType(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Quantization(StrEnum):
    INT8 = "int8"
    FP8 = "fp8"
    FP8_BLOCK = "fp8_block"


Model = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint directory.",
        exists=True,
        file_okay=False,
        show_default="SmolLM2-135M-Instruct",
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of each, in turns.")]
Threads = Annotated[int, typer.Option(min=0, help="0: one per core.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write everything found there.")]
DTypeOption = Annotated[DType, typer.Option(help="What the engine computes in.")]


@dataclass(frozen=True, slots=True)
class Work:
    """What is run, how often and on what."""

    model: Model = None
    count: Annotated[
        list[int] | None, typer.Option("-n", min=1, help="Jobs of W at once; repeatable.")
    ] = None
    workload: Annotated[
        list[WorkloadName] | None,
        typer.Option(
            "--workload",
            "-w",
            help="W: 564 tokens in, 128 out; S: 16 jobs of mixed lengths. Repeatable.",
        ),
    ] = None
    repeats: Repeats = 3
    threads: Threads = 0

    def config(self, **rest: Any) -> BenchConfig:
        """The same for a bench of the engine."""
        from tokenfleet.worker.bench.runs import BenchConfig

        return BenchConfig(
            model=self.model or base.demo_model(),
            counts=tuple(self.count or (8,)),
            workloads=tuple(name.value for name in self.workload or (WorkloadName.W,)),
            repeats=self.repeats,
            threads=self.threads,
            **rest,
        )


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the engine under test computes."""

    dtype: DTypeOption = DType.AUTO
    quantization: Annotated[
        Quantization | None, typer.Option(help="Round the weights while loading.")
    ] = None
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = (
        576
    )

    def settings(self) -> dict[str, Any]:
        """The same as the engine's settings."""
        settings: dict[str, Any] = {
            "dtype": self.dtype.value,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        if self.quantization is not None:
            settings["quantization"] = self.quantization.value
        return settings


WORK, ARITHMETIC = Work(), Arithmetic()

FirstTokenS = Annotated[
    float,
    typer.Option(
        min=0.0, help="Seconds of short turns for each N of W: what Redis adds to the first token."
    ),
]

COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tok/s", "tokens_per_s", lambda v: f"{v:.1f}"),
    ("TTFT p50", "ttft_p50_s", lambda v: f"{v:.2f} s"),
    ("p99", "ttft_p99_s", lambda v: f"{v:.2f} s"),
    ("per token p50", "tpot_p50_s", lambda v: f"{v * 1e3:.1f} ms"),
    ("p99", "tpot_p99_s", lambda v: f"{v * 1e3:.1f} ms"),
    ("gap p99", "gap_p99_s", lambda v: f"{v * 1e3:.0f} ms"),
    ("steps", "steps", lambda v: f"{v:.0f}"),
    ("mean batch", "mean_batch", lambda v: f"{v:.1f}"),
    ("peak memory", "peak_rss_bytes", lambda v: f"{v / 2**20:.0f} MiB"),
    ("blocks used/needed", "blocks_used_max", lambda v: f"{v:.0f}"),
)


def bench_engine(
    work: Work = WORK,
    compare: Annotated[
        list[Peer] | None, typer.Option(help="Run this beside it, in the same run.")
    ] = None,
    compare_dtype: Annotated[DType, typer.Option(help="What the peer computes in.")] = (
        DType.BFLOAT16
    ),
    arithmetic: Arithmetic = ARITHMETIC,
    json_path: JsonPath = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run W or S on the engine alone: tokens/s, latencies, steps, memory.

    Without -w it is W, without -n with 8 jobs at once.
    """
    from tokenfleet.worker.bench import runs as bench

    config = work.config(
        compare=tuple(peer.value for peer in compare or ()),
        compare_dtype=compare_dtype.value,
        engine=arithmetic.settings(),
    )
    report(bench.bench_engine, config, json_path, output)


def bench_fleet(
    work: Work = WORK,
    arithmetic: Arithmetic = ARITHMETIC,
    first_token_s: FirstTokenS = 40.0,
    json_path: JsonPath = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run the same work through Redis and a worker, and compare with the engine alone.

    Without -w it is W, without -n with 8 jobs at once.
    """
    from tokenfleet.worker.bench import fleet

    config = work.config(engine=arithmetic.settings(), first_token_s=first_token_s)
    report(fleet.bench_fleet, config, json_path, output)


def bench_features(
    model: Model = None,
    repeats: Repeats = 3,
    threads: Threads = 0,
    dtype: DTypeOption = DType.AUTO,
    json_path: JsonPath = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Measure what sampling and structured output cost a step, and what shared prompts save."""
    from tokenfleet.worker.bench.features import features

    found = features(
        model or base.demo_model(), dtype=dtype.value, threads=threads, repeats=repeats
    )
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n")
    if output is Output.JSON:
        base.print_json(found)
        return
    for cost in found["costs"]:
        typer.echo(
            f"{cost['name']}: {cost['with_ms']:.1f} ms a step of {found['rows']} rows, greedy "
            f"{cost['plain_ms']:.1f} ms: {cost['ratio']:.2f} x"
        )
    shared, rolled = found["shared_prompt"], found["rollouts"]
    typer.echo(
        f"{rolled['samples']} samples of one prompt: {rolled['blocks_used']} blocks, "
        f"{rolled['blocks_separate']} without sharing"
    )
    typer.echo(
        f"{shared['prompts']} prompts that begin alike: {shared['computed']} of "
        f"{shared['tokens']} tokens computed"
    )


def bench_queue(
    jobs: Annotated[int, typer.Option(min=256, help="Jobs to submit, each time.")] = 10_000,
    flushes: Annotated[int, typer.Option(min=1, help="Flushes of 256 jobs, each time.")] = 100,
    repeats: Repeats = 3,
    server: Annotated[
        Path | None,
        typer.Option(
            help="A redis-server to measure.", exists=True, show_default="the embedded server"
        ),
    ] = None,
    json_path: JsonPath = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Submit jobs and emit tokens without an engine, beside redis-benchmark's XADD."""
    from tokenfleet.worker.bench import queue

    found = base.measure(
        lambda: queue.bench_queue(queue.QueueBench(jobs, flushes, repeats, server), base.note),
        json_path,
        output,
    )
    if found is None:
        return
    results = found["results"]
    for name in (
        *("jobs_per_s", "client_us_per_job", "server_us_per_job"),
        *("emits_per_s", "packing_ms_per_flush", "sending_ms_per_flush"),
        *("client_ms_per_flush", "server_ms_per_flush"),
        *("xadd_per_s", "xadd_pipelined_per_s"),
    ):
        if name in results:
            one = results[name]
            figures = (f"{one[part]:,.2f}" for part in ("median", "low", "high"))
            typer.echo("{}: {} ({} to {})".format(name.replace("_", " "), *figures))
    for name, value in found["ratios"].items():
        typer.echo(f"{name} = {value:.3f}")


def report(
    run: Callable[[BenchConfig, Say, Keep], Report],
    config: BenchConfig,
    json_path: Path | None,
    output: Output,
) -> None:
    """Run a bench; its figures go where they are asked for. Exits 1 when it cannot be finished.

    The file is written after every turn, so that what ends the bench leaves what was found.
    """
    from tokenfleet.worker.bench.runs import BenchFailed

    def keep(report: Report) -> None:
        if json_path is not None:
            json_path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(base.TERMINATED))  # and clean up on the way
    try:
        report = run(config, base.note, keep)
    except BenchFailed as error:
        base.say_error("BenchFailed", str(error), output)
        raise typer.Exit(base.SOME_FAILED) from None
    keep(report)
    if output is Output.JSON:
        base.print_json(report.as_dict())
        return
    _print_table(report)


def _print_table(report: Report) -> None:
    from tokenfleet.worker.bench.first_token import in_words

    rows = []
    for summary in report.summaries:
        row: dict[str, Any] = {"workload": summary.workload, "engine": summary.engine}
        for number, (_, name, show) in enumerate(COLUMNS):
            row[str(number)] = show(summary.middle(name)) if summary.has(name) else "-"
        if summary.has("blocks_needed_max"):
            row[str(len(COLUMNS) - 1)] += f"/{summary.middle('blocks_needed_max'):.0f}"
        low, high = summary.span("tokens_per_s")
        row["spread"] = f"{low:.1f} - {high:.1f}"
        rows.append(row)
    titles = {str(number): title for number, (title, _, _) in enumerate(COLUMNS)}
    columns = ("workload", "engine", "0", "spread", *list(titles)[1:])
    base.print_rows(columns, rows, Output.TEXT, empty="", titles=titles)
    for found in report.ratios():
        turns = found["turn_by_turn"]
        typer.echo(
            f"{found['workload']}: {found['of']} / {found['to']} = "
            f"{found['tokens_per_s']:.2f} x tokens/s; turn by turn {turns['median']:.2f} "
            f"(95 % of resamples: {turns['low']:.2f} to {turns['high']:.2f})"
        )
    for summary in report.summaries:
        if times := _cpu_times(summary):
            typer.echo(f"{summary.workload}: {summary.engine}: CPU s per 1000 tokens: {times}")
        if summary.has("ttft_outside_worker_s"):
            typer.echo(
                f"{summary.workload}: outside of the worker: "
                f"{summary.middle('ttft_outside_worker_s') * 1e3:.1f} ms of the mean TTFT "
                f"({summary.middle('ttft_until_claimed_s') * 1e3:.1f} ms from submission to claim, "
                f"{summary.middle('ttft_from_worker_s') * 1e3:.1f} ms from worker to reader)"
            )
        if summary.has("blocks_spare_per_sequence_max"):
            most = summary.span("blocks_spare_per_sequence_max")[1]
            typer.echo(
                f"{summary.workload}: blocks in use beyond those that the tokens present need: "
                f"at most {most:.2f} per sequence"
            )
    for pairs in report.first_tokens:
        for line in in_words(pairs):
            typer.echo(line)


def _cpu_times(summary: Summary) -> str:
    """Of each process that a run of it is made of."""
    from tokenfleet.worker.bench.cpu_time import PREFIX

    names = [name for name in summary.runs[0] if name.startswith(PREFIX)]
    return ", ".join(f"{name.removeprefix(PREFIX)} {summary.middle(name):.3f}" for name in names)
