"""`tokenfleet gateway`: the light client's own command, under the name where people look for it.

Its flags are its own (producer/gateway/command.py); nothing of them is repeated here.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

PASS_ON: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


def gateway(
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="[FLAGS]...", help="See: tokenfleet-gateway -h")
    ] = None,
) -> None:
    """Serve an OpenAI-compatible API and a status page over the fleet."""
    from tokenfleet.producer.gateway.command import run

    raise typer.Exit(run(flags or []))
