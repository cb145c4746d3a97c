"""`tokenfleet bench scaling`: what more workers do to the time of a fixed set of jobs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output, OutputOption

COLUMNS = (
    *("workers", "wall_s", "share", "cpu_s_per_1000_tokens"),
    *("workers_busy", "machine_busy", "steps"),
)


def bench_scaling(
    model: Annotated[
        Path | None,
        typer.Option(help="Directory with a tokenizer.", exists=True, file_okay=False),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option("-n", min=1, help="Workers; repeatable.", show_default="1, 2, 8"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs to run.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Of each job.")] = 50,
    step_ms: Annotated[float, typer.Option(min=1.0, help="How long a device's step lasts.")] = 100,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = (
        None
    ),
    output: OutputOption = Output.TEXT,
) -> None:
    """Run a fixed set of jobs on 1, 2 and 8 workers with simulated devices."""
    from tokenfleet.worker.bench.scaling import Workload
    from tokenfleet.worker.bench.scaling import bench_scaling as measure

    workload = Workload(jobs=jobs, tokens=tokens, step_ms=step_ms)
    rows = asyncio.run(measure(workers or [1, 2, 8], workload, model or base.demo_model(output)))
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=2) + "\n")
    if output is Output.TEXT:
        typer.echo(
            f"{jobs} jobs of {tokens} tokens, {workload.slots} slots a worker, "
            f"steps of {step_ms:g} ms"
        )
    base.print_rows(COLUMNS, rows, output, empty="", show=_show)


def _show(_: str, value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
