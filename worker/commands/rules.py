"""Commands about what holds for a fleet: limits of tenants, queues that are paused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Broker, Output, OutputOption
from tokenfleet.worker.commands.jobs import Priority

if TYPE_CHECKING:
    from tokenfleet.producer.connection import Connection
    from tokenfleet.producer.fleet import FleetReader
    from tokenfleet.worker.rules import Rules

Model = Annotated[str, typer.Argument(help="What workers serve it as.", show_default=False)]
Priorities = Annotated[
    list[Priority] | None, typer.Option("--priority", help="Only this class; repeatable.")
]


def queue_limit(
    tenant: Annotated[
        str | None,
        typer.Argument(help="The tenant, or '*' for all without limits of their own."),
    ] = None,
    running: Annotated[int | None, typer.Option(min=0, help="Most jobs that run at once.")] = None,
    waiting: Annotated[
        int | None, typer.Option(min=0, help="Most jobs that wait; more are refused: QueueFull.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the limits away.")] = False,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Set how many jobs a tenant may have, all models together; without options, show what is set.

    Tenants with limits take turns in every queue, however many jobs one of them submits. What is
    not given is not limited.
    """
    wanted = running is not None or waiting is not None
    if remove and wanted:
        raise typer.BadParameter("give limits or --remove, not both", param_hint="--remove")
    if tenant is None and (remove or wanted):
        raise typer.BadParameter("name the tenant, or '*'", param_hint="TENANT")

    async def work(rules: Rules) -> int:
        from tokenfleet.worker.rules import TenantLimits

        if tenant is not None and remove:
            await rules.remove_limits(tenant)
        elif tenant is not None and wanted:
            await rules.set_limits(TenantLimits(tenant, running, waiting))
        rows = [asdict(one) for one in await rules.limits() if tenant in (None, one.tenant)]
        columns = ("tenant", "running", "waiting")
        base.print_rows(columns, rows, output, empty="no limits")
        return base.OK

    base.run(_with_rules(work, broker), output)


def queue_pause(
    model: Model,
    priority: Priorities = None,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Let no worker claim a model's jobs. What runs goes on; what is submitted waits."""

    async def work(rules: Rules) -> int:
        await rules.pause(model, _classes(priority))
        return await _print_paused(rules, output)

    base.run(_with_rules(work, broker, about=model), output)


def queue_resume(
    model: Model,
    priority: Priorities = None,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Let workers claim a model's jobs again."""

    async def work(rules: Rules) -> int:
        await rules.resume(model, _classes(priority))
        return await _print_paused(rules, output)

    base.run(_with_rules(work, broker, about=model), output)


async def _print_paused(rules: Rules, output: Output) -> int:
    rows = [{"model": m, "priority": p} for m, p in sorted(await rules.paused())]
    if rows and output is Output.TEXT:
        base.note("paused now:")
    base.print_rows(("model", "priority"), rows, output, empty="no queue is paused")
    return base.OK


def _classes(priorities: list[Priority] | None) -> list[str]:
    return [priority.value for priority in priorities or Priority]


async def said_if_unknown(fleet: FleetReader, model: str | None) -> None:
    """A note that a model is perhaps misspelled: nobody serves it and no queue is called so."""
    if model is not None and not await fleet.knows(model):
        known = ", ".join(sorted(await fleet.models())) or "none"
        base.note(f"no worker serves {model!r} and no queue is called so; known: {known}")


async def _with_rules(
    work: Callable[[Rules], Awaitable[int]],
    broker: Broker,
    *,
    about: str | None = None,
) -> int:
    """The work's exit code; a model that nobody knows is perhaps misspelled, and said so."""

    async def with_connection(connection: Connection) -> int:
        from tokenfleet.producer.fleet import FleetReader
        from tokenfleet.worker.rules import Rules

        fleet = FleetReader(connection)
        await said_if_unknown(fleet, about)
        return await work(Rules(connection, await fleet.partitions()))

    return await base.with_connection(with_connection, broker)
