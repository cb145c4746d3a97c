"""Commands about the fleet: queue list and depth, dead list, show and replay, doctor."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Namespace, Output, OutputOption, RedisUrl

if TYPE_CHECKING:
    from tokenfleet.producer.connection import Connection
    from tokenfleet.producer.protocol import JobRequest
    from tokenfleet.worker.commands.admin import Admin

DEAD_COLUMNS = ("job_id", "died", "model", "attempt", "failures", "error_code", "error_message")

DeadId = Annotated[str, typer.Argument(help="Job id, from `dead list`.", show_default=False)]


def queue_list(
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show every queue: how many jobs wait, how many run, how long the next one has waited."""

    async def work(admin: Admin) -> int:
        rows = [asdict(depth) for depth in await admin.queues()]
        columns = ("model", "priority", "waiting", "running", "oldest_s", "paused")
        base.print_rows(columns, rows, output, empty="no queues yet", show=_show)
        return base.OK

    base.run(_with_admin(work, redis_url, namespace), output)


def queue_depth(
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print how many jobs wait, run and are delayed: the figures to scale by."""

    async def work(admin: Admin) -> int:
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

    base.run(_with_admin(work, redis_url, namespace), output)


def dead_list(
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 100,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show the jobs that were given up, and why."""

    async def work(admin: Admin) -> int:
        rows = [_letter_row(letter) for letter in await admin.dead(limit)]
        base.print_rows(DEAD_COLUMNS, rows, output, empty="no dead letters")
        return base.OK

    base.run(_with_admin(work, redis_url, namespace), output)


def dead_show(
    job_id: DeadId,
    with_prompt: Annotated[
        bool, typer.Option("--with-prompt", help="Print what it said, too.")
    ] = False,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
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

    base.run(_with_admin(work, redis_url, namespace), output)


def dead_replay(
    job_ids: Annotated[list[str] | None, typer.Argument(help="Which ones.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Submit dead letters again, as new jobs."""
    if bool(job_ids) == every:
        raise typer.BadParameter("give job ids, or --all", param_hint="JOB_IDS")

    async def work(admin: Admin) -> int:
        from tokenfleet.producer.errors import TokenfleetError

        chosen = job_ids or [letter.job_id for letter in await admin.dead(10_000)]
        rows, code = [], base.OK
        for job_id in chosen:
            row: dict[str, Any] = {"job_id": job_id, "new_job_id": None, "error": None}
            try:
                row["new_job_id"] = await admin.replay(job_id)
            except TokenfleetError as error:
                row["error"] = str(error)
                code = base.SOME_FAILED
            rows.append(row)
        columns = ("job_id", "new_job_id", "error")
        base.print_rows(columns, rows, output, empty="no dead letters")
        return code

    base.run(_with_admin(work, redis_url, namespace), output)


def doctor(
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
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

    base.run(base.with_connection(work, redis_url, namespace, ready=False), output)


async def _with_admin(
    work: Callable[[Admin], Awaitable[int]], redis_url: str, namespace: str
) -> int:
    async def with_connection(connection: Connection) -> int:
        from tokenfleet.worker.commands.admin import Admin

        return await work(Admin(connection))

    return await base.with_connection(with_connection, redis_url, namespace)


def _show(column: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return column
    return f"{value:.1f}" if column.endswith("_s") else str(value)


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
