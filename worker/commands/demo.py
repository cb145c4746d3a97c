"""`tokenfleet demo`: two workers, a real model, a kill in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output, OutputOption


def demo(
    trace_dir: Annotated[
        Path, typer.Option(help="Where spans and the workers' logs are written.")
    ] = Path("traces"),
    kill: Annotated[
        bool, typer.Option("--kill/--no-kill", help="SIGKILL one worker in the middle.")
    ] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Lines even on a terminal.")] = False,
    output: OutputOption = Output.TEXT,
    simulated_step_ms: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Eight chat jobs over two workers, one killed in the middle; no token is lost."""
    from tokenfleet.worker.demo.show import DemoConfig, run_demo
    from tokenfleet.worker.demo.view import JsonView, make_view

    base.note("preparing SmolLM2-135M-Instruct (converted once, then cached)")
    base.demo_model(output)
    config = DemoConfig(trace_dir=trace_dir, kill=kill, simulated_step_ms=simulated_step_ms)
    view = JsonView() if output is Output.JSON else make_view(plain=plain)
    base.run(run_demo(config, view), output)
