"""Commands about the fleet: queue list, depth and ensure, doctor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Broker, Output, OutputOption
from tokenfleet.worker.commands.rules import said_if_unknown

if TYPE_CHECKING:
    from tokenfleet.producer.connection import Connection
    from tokenfleet.worker.commands.admin import Admin


def queue_list(
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show every queue: how many jobs wait, how many run, how long the next one has waited."""

    async def work(admin: Admin) -> int:
        rows = [asdict(depth) for depth in await admin.queues()]
        columns = ("model", "priority", "waiting", "running", "oldest_s", "paused")
        base.print_rows(columns, rows, output, empty="no queues yet", show=_show)
        return base.OK

    base.run(with_admin(work, broker), output)


def queue_depth(
    model: Annotated[
        str | None, typer.Option(help="Only this model's; delayed jobs are counted of all.")
    ] = None,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print how many jobs wait, run and are delayed: the figures to scale by."""

    async def work(admin: Admin) -> int:
        await said_if_unknown(admin, model)
        depths = [d for d in await admin.queues() if model in (None, d.model)]
        counts = {
            "waiting": sum(depth.waiting for depth in depths),
            "running": sum(depth.running for depth in depths),
            "delayed": await admin.delayed(),
        }
        if output is Output.JSON:
            base.print_json(counts)
        else:
            typer.echo("  ".join(f"{name} {count}" for name, count in counts.items()))
        return base.OK

    base.run(with_admin(work, broker), output)


def queue_ensure(
    models: Annotated[
        list[str], typer.Argument(help="What workers serve them as.", show_default=False)
    ],
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Make a model's queues and consumer groups where they are not there.

    Workers do so themselves; this is for what looks at the queues before the first worker is up,
    such as a scaler. What is there stays as it is.
    """

    async def work(connection: Connection) -> int:
        from tokenfleet.producer.fleet import FleetReader
        from tokenfleet.worker.queue import JobQueue

        for model in models:
            queue = JobQueue(
                connection, namespace=broker.namespace, worker_id="ensure", model_name=model
            )
            await queue.ensure_groups()
            await queue.aclose()
        rows = [
            {"model": depth.model, "priority": depth.priority, "waiting": depth.waiting}
            for depth in await FleetReader(connection).queues()
            if depth.model in models
        ]
        base.print_rows(("model", "priority", "waiting"), rows, output, empty="")
        return base.OK

    base.run(base.with_connection(work, broker), output)


def doctor(
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Check the server and the fleet, and say what to change. Exit code 1: jobs are in danger."""

    async def work(connection: Connection) -> int:
        from tokenfleet.worker.commands.doctor import BAD, Doctor

        await connection.ask_server("HELLO")  # where nothing can be asked, nothing is found
        findings = await Doctor(connection).examine()
        rows = [asdict(finding) for finding in findings]
        base.print_rows(("check", "level", "found", "advice"), rows, output, empty="")
        return base.SOME_FAILED if any(f.level == BAD for f in findings) else base.OK

    base.run(base.with_connection(work, broker, ready=False), output)


async def with_admin(work: Callable[[Admin], Awaitable[int]], broker: Broker) -> int:
    """The exit code of work on a namespace."""

    async def with_connection(connection: Connection) -> int:
        from tokenfleet.worker.commands.admin import Admin

        return await work(Admin(connection))

    return await base.with_connection(with_connection, broker)


def _show(column: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return column
    return f"{value:.1f}" if column.endswith("_s") else str(value)
