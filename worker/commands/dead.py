"""Commands about the jobs that were given up: dead list, show, replay, drop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Broker, Output, OutputOption
from tokenfleet.worker.commands.queues import with_admin

if TYPE_CHECKING:
    from tokenfleet.producer.protocol import JobRequest
    from tokenfleet.worker.commands.admin import Admin

COLUMNS = ("job_id", "died", "model", "attempt", "failures", "error_code", "error_message")
MOST_AT_ONCE = 10_000

DeadId = Annotated[str, typer.Argument(help="Job id, from `dead list`.", show_default=False)]
DeadIds = Annotated[list[str] | None, typer.Argument(help="Which ones.")]
Every = Annotated[bool, typer.Option("--all", help="All of them.")]


def dead_list(
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 100,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show the jobs that were given up, and why."""

    async def work(admin: Admin) -> int:
        rows = [_letter_row(letter) for letter in await admin.dead(limit)]
        base.print_rows(COLUMNS, rows, output, empty="no dead letters")
        return base.OK

    base.run(with_admin(work, broker), output)


def dead_show(
    job_id: DeadId,
    with_prompt: Annotated[
        bool, typer.Option("--with-prompt", help="Print what it said, too.")
    ] = False,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show one dead letter and what it asked for."""

    async def work(admin: Admin) -> int:
        letter, request = await admin.dead_one(job_id)
        described = _letter_row(letter) | _request_row(request, with_prompt=with_prompt)
        if output is Output.JSON:
            base.print_json(described)
        else:
            for name, value in described.items():
                typer.echo(f"{name.replace('_', ' '):14} {value}")
        return base.OK

    base.run(with_admin(work, broker), output)


def dead_replay(
    job_ids: DeadIds = None,
    every: Every = False,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Submit dead letters again, as new jobs."""

    async def replay(admin: Admin, job_id: str) -> dict[str, Any]:
        return {"new_job_id": await admin.replay(job_id)}

    work = _with_each(replay, _chosen(job_ids, every), {"new_job_id": None}, output)
    base.run(with_admin(work, broker), output)


def dead_drop(
    job_ids: DeadIds = None,
    every: Every = False,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Forget dead letters for good: their request, their log, their reason."""

    async def drop(admin: Admin, job_id: str) -> dict[str, Any]:
        from tokenfleet.producer.errors import JobExpired

        if not await admin.drop(job_id):
            raise JobExpired(job_id, "dead letter")
        return {"dropped": True}

    work = _with_each(drop, _chosen(job_ids, every), {"dropped": False}, output)
    base.run(with_admin(work, broker), output)


def _chosen(job_ids: list[str] | None, every: bool) -> list[str]:
    """The ids that were named; none: all of them."""
    if bool(job_ids) == every:
        raise typer.BadParameter("give job ids, or --all", param_hint="JOB_IDS")
    return job_ids or []


def _with_each(
    act: Callable[[Admin, str], Awaitable[dict[str, Any]]],
    chosen: list[str],
    undone: dict[str, Any],
    output: Output,
) -> Callable[[Admin], Awaitable[int]]:
    """Work that does one thing to each letter; what fails is a row with its reason, and code 1.

    Args:
        undone: what a row says where nothing was done.
    """

    async def work(admin: Admin) -> int:
        from tokenfleet.producer.errors import InvalidJob, JobEnded

        ids = chosen or [letter.job_id for letter in await admin.dead(MOST_AT_ONCE)]
        rows: list[dict[str, Any]] = []
        for job_id in ids:
            row: dict[str, Any] = {"job_id": job_id, **undone, "error": None}
            try:
                row |= await act(admin, job_id)
            except (InvalidJob, JobEnded) as error:
                row["error"] = str(error)
            rows.append(row)
        columns = ("job_id", *undone, "error")
        base.print_rows(columns, rows, output, empty="no dead letters")
        return base.SOME_FAILED if any(row["error"] for row in rows) else base.OK

    return work


def _letter_row(letter: Any) -> dict[str, Any]:
    row = asdict(letter)
    died = time.gmtime(row.pop("died_ms") / 1000)
    return {"job_id": row.pop("job_id"), "died": time.strftime("%Y-%m-%dT%H:%M:%SZ", died), **row}


def _request_row(request: JobRequest | None, *, with_prompt: bool) -> dict[str, Any]:
    if request is None:
        return {"request": "cannot be read"}
    said = request.prompt or request.messages or request.prompt_token_ids or ""
    kind = "prompt" if request.prompt else "messages" if request.messages else "prompt_token_ids"
    return {
        "tenant": request.tenant,
        "sampling": request.sampling.to_wire(),
        "metadata": dict(request.metadata),
        kind: said if with_prompt else f"<{len(said)} long; see it with --with-prompt>",
    }
