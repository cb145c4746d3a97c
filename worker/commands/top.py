"""`tokenfleet top`: the fleet as it is now, again and again.

The figures are those of the gateway's status page: both ask producer/fleet.py.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Broker, Output, OutputOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tokenfleet.producer.connection import Connection
    from tokenfleet.producer.fleet import FleetReader
    from tokenfleet.producer.fleet_view import FleetStatus, WorkerLine

STALE_S = 10.0
"""A worker that was not seen for this long has missed two heartbeats."""


def top(
    once: Annotated[bool, typer.Option("--once", help="One look, then end.")] = False,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Between two looks.")] = 2.0,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Watch workers, queues and throughput. Without a terminal: one look, as with --once.

    With -o json each look is one line, for as long as somebody reads.
    """
    live = output is Output.TEXT and sys.stdout.isatty() and not once
    repeats = live or (output is Output.JSON and not once)
    base.run(_watch(broker, output, interval_s if repeats else None, live), output)


async def _watch(broker: Broker, output: Output, interval_s: float | None, live: bool) -> int:
    async def work(connection: Connection) -> int:
        from tokenfleet.producer.fleet import FleetReader

        reader = FleetReader(connection)
        if live:
            assert interval_s is not None
            await _live(reader, interval_s)
        while not live:
            _print(await reader.status(), output)
            if interval_s is None:
                break
            await asyncio.sleep(interval_s)
        return base.OK

    return await base.with_connection(work, broker)


async def _live(reader: FleetReader, interval_s: float) -> None:
    """On the terminal's other screen, until Ctrl-C. A Redis that is away is said and waited for."""
    from rich.live import Live
    from rich.text import Text

    from tokenfleet.producer.errors import BrokerUnavailable

    seen: RenderableType = Text("looking ...")
    with Live(seen, screen=True, auto_refresh=False) as screen:
        while True:
            try:
                seen = drawn(await reader.status())
                screen.update(seen, refresh=True)
            except BrokerUnavailable as error:
                from rich.console import Group

                warning = Text(f"\nas last seen: {error}", style="bold red")
                screen.update(Group(seen, warning), refresh=True)
            await asyncio.sleep(interval_s)


def _print(status: FleetStatus, output: Output) -> None:
    if output is Output.JSON:
        base.print_json(as_dict(status))
        sys.stdout.flush()
        return
    from tokenfleet.worker.commands.tables import console

    console().print(drawn(status))


def as_dict(status: FleetStatus) -> dict[str, Any]:
    """The look as a program reads it."""
    sums = ("tokens_per_s", "running", "waiting", "slots")
    return {**asdict(status), "total": {name: getattr(status, name) for name in sums}}


def drawn(status: FleetStatus) -> RenderableType:
    """The look as a person reads it: totals, workers, queues."""
    from rich.console import Group
    from rich.text import Text

    head = Text.assemble(
        (f"{status.tokens_per_s:.0f}", "bold"), " tok/s   ",
        (status.slots_used, "bold"), " slots   ",
        (f"{status.waiting}", "bold"), " waiting   ",
        (f"{status.delayed}", "bold"), " delayed   ",
        (f"{status.dead}", "bold red" if status.dead else "bold"), " dead",
    )  # fmt: skip
    parts: list[Any] = [head, Text(), _workers(status.workers), Text(), _queues(status)]
    return Group(*parts)


def _workers(workers: tuple[WorkerLine, ...]) -> RenderableType:
    from rich.text import Text

    from tokenfleet.worker.commands.tables import Rows

    if not workers:
        return Text("no workers", style="yellow")
    titles = ("worker", "model", "state", "slots", "tok/s", "KV", "seen")
    rows = [
        (
            Text(worker.worker),
            Text(worker.model),
            Text(worker.state, style="" if worker.state == "ready" else "yellow"),
            Text(worker.slots_used),
            Text("-" if worker.tokens_per_s is None else f"{worker.tokens_per_s:.1f}"),
            Text("-" if worker.kv_usage is None else f"{worker.kv_usage:.0%}"),
            Text(f"{worker.seen_s:.0f} s ago", style="red" if worker.seen_s > STALE_S else ""),
        )
        for worker in workers
    ]
    return Rows(titles, rows, right=("slots", "tok/s", "KV", "seen"))


def _queues(status: FleetStatus) -> RenderableType:
    from rich.text import Text

    from tokenfleet.producer.fleet_view import duration
    from tokenfleet.worker.commands.tables import Rows

    if not status.queues:
        return Text("no queues", style="yellow")
    titles = ("model", "priority", "waiting", "handed back", "running", "oldest", "")
    rows = [
        (
            Text(queue.model),
            Text(queue.priority),
            Text(str(queue.waiting)),
            Text(str(queue.front)),
            Text(str(queue.running)),
            Text("-" if queue.oldest_s is None else duration(queue.oldest_s)),
            Text(status.trouble_of(queue), style="yellow"),
        )
        for queue in status.queues
    ]
    return Rows(titles, rows, right=("waiting", "handed back", "running", "oldest"))
