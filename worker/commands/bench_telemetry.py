"""`tokenfleet bench telemetry`: what a collector that never answers costs jobs and the exit."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output, OutputOption


class Protocol(StrEnum):
    GRPC = "grpc"
    HTTP = "http"


def bench_telemetry(
    model: Annotated[
        Path | None,
        typer.Option(help="Directory with a tokenizer.", exists=True, file_okay=False),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Of each set.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Of each job.")] = 40,
    step_ms: Annotated[float, typer.Option(min=1.0, help="How long a device's step lasts.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Sets for each worker, in turns.")] = 5,
    protocol: Annotated[Protocol, typer.Option(help="What the collector is spoken to in.")] = (
        Protocol.GRPC
    ),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = (
        None
    ),
    output: OutputOption = Output.TEXT,
) -> None:
    """Run sets of jobs on a worker that exports nothing and on one with a black hole, in turns."""
    from tokenfleet.worker.bench import telemetry as bench

    config = bench.TelemetryBench(
        model or base.demo_model(output),
        jobs=jobs,
        tokens=tokens,
        step_ms=step_ms,
        repeats=repeats,
        protocol=protocol.value,
    )
    found = base.measure(lambda: bench.bench_telemetry(config, base.note), json_path, output)
    if found is None:
        return
    for name, way in found["ways"].items():
        typer.echo(
            f"{name}: {way['tokens_per_s']:,.0f} tokens/s ({way['lowest']:,.0f} to "
            f"{way['highest']:,.0f}), {way['cpu_us_per_token']:.0f} us of the worker's CPU a "
            f"token, ended {way['exit_s']:.2f} s after SIGTERM"
        )
    pairs = found["pair_ratio"]
    typer.echo(
        f"throughput with the black hole / without = {found['throughput_ratio']:.3f} (of pairs: "
        f"{pairs['median']:.3f}, {pairs['lowest']:.3f} to {pairs['highest']:.3f}); exit within "
        f"the grace time of {found['grace_s']:g} s: {'yes' if found['exit_within_grace'] else 'no'}"
    )
