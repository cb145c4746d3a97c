"""`tokenfleet demo`: two workers, a real model, a kill in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.worker import cli_base as base
from tokenfleet.worker.cli_base import Output


def demo(
    trace_dir: Annotated[Path, typer.Option(help="Where the spans are written.")] = Path("traces"),
    kill: Annotated[
        bool, typer.Option("--kill/--no-kill", help="SIGKILL one worker in the middle.")
    ] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Lines even on a terminal.")] = False,
) -> None:
    """Eight chat jobs over two workers, one killed in the middle; no token is lost."""
    from tokenfleet.worker.demo import DemoConfig, run_demo
    from tokenfleet.worker.demo_view import make_view

    config = DemoConfig(trace_dir=trace_dir, kill=kill)
    base.run(run_demo(config, make_view(plain=plain)), Output.TEXT)
