"""`tokenfleet gateway`: the light client's own command, under the name where people look for it.

Its flags are its own (producer/gateway/command.py); nothing of them is repeated here.
`tokenfleet bench gateway` says what it adds.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output, OutputOption
from tokenfleet.worker.commands.bench import JsonPath, Model, Repeats

PASS_ON: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


def gateway(
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAGS]...", help="See: tokenfleet gateway -h")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API and a status page over the fleet."""
    from tokenfleet.producer.gateway.command import run

    raise typer.Exit(run(flags or [], prog="tokenfleet gateway"))


def bench_gateway(
    model: Model = None,
    requests: Annotated[int, typer.Option("-n", min=1, help="Each way, in each round.")] = 40,
    streams: Annotated[int, typer.Option(min=1, help="At once, each way, in each round.")] = 16,
    repeats: Repeats = 3,
    json_path: JsonPath = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Measure what the gateway adds to the first token, and what it takes of the throughput."""
    from tokenfleet.worker.bench.gateway import GatewayBench
    from tokenfleet.worker.bench.gateway import bench_gateway as run

    config = GatewayBench(model or base.demo_model(), requests, streams, repeats=repeats)
    found = base.measure(lambda: run(config, base.note), json_path, output)
    if found is None:
        return
    for name, figures in found["ways"].items():
        typer.echo(
            f"{name:8} TTFT p50 {figures['ttft_p50_ms']:.1f} ms, "
            f"p99 {figures['ttft_p99_ms']:.1f} ms   {streams} streams: "
            f"{figures['tokens_per_s']:.0f} tokens/s"
        )
    typer.echo(
        f"the gateway adds {found['added_ttft_p50_ms']:.1f} ms to the first token "
        f"({found['ttft_p50_ratio']:.2f} x) and leaves {found['tokens_per_s_ratio']:.2f} x tokens/s"
    )
