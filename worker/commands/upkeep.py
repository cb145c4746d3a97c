"""Commands that put a fleet's Redis in order: queue ensure, dead drop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Namespace, Output, OutputOption, RedisUrl

if TYPE_CHECKING:
    from tokenfleet.producer.connection import Connection


def queue_ensure(
    models: Annotated[
        list[str], typer.Argument(help="What workers serve them as.", show_default=False)
    ],
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
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
            queue = JobQueue(connection, namespace=namespace, worker_id="ensure", model_name=model)
            await queue.ensure()
            await queue.aclose()
        rows = [
            {"model": depth.model, "priority": depth.priority, "waiting": depth.waiting}
            for depth in await FleetReader(connection).queues()
            if depth.model in models
        ]
        base.print_rows(("model", "priority", "waiting"), rows, output, empty="")
        return base.OK

    base.run(base.with_connection(work, redis_url, namespace), output)


def dead_drop(
    job_ids: Annotated[list[str] | None, typer.Argument(help="Which ones.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Forget dead letters for good: their request, their log, their reason."""
    if bool(job_ids) == every:
        raise typer.BadParameter("give job ids, or --all", param_hint="JOB_IDS")

    async def work(connection: Connection) -> int:
        from tokenfleet.producer.errors import JobExpired
        from tokenfleet.worker.commands.admin import Admin

        admin = Admin(connection)
        chosen = job_ids or [letter.job_id for letter in await admin.dead(10_000)]
        rows: list[dict[str, Any]] = []
        for job_id in chosen:
            dropped = await admin.drop(job_id)
            error = None if dropped else str(JobExpired(job_id, "a dead letter"))
            rows.append({"job_id": job_id, "dropped": dropped, "error": error})
        columns = ("job_id", "dropped", "error")
        base.print_rows(columns, rows, output, empty="no dead letters")
        return base.OK if all(row["dropped"] for row in rows) else base.SOME_FAILED

    base.run(base.with_connection(work, redis_url, namespace), output)
