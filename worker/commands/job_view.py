"""What the commands about one job print: an id, events as they come, a result.

Text that streams is written as it comes and nothing else goes to standard output, so that a pipe
gets exactly what the model said.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncJob, Event, JobResult


def print_id(job: AsyncJob, output: Output) -> int:
    if output is Output.JSON:
        base.print_json({"job_id": job.id, "deduplicated": job.deduplicated})
    else:
        typer.echo(job.id)
        if sys.stdout.isatty():
            base.note(f"follow it with: tokenfleet stream {job.id}")
    return base.OK


async def follow(job: AsyncJob, offset: int, output: Output) -> int:
    """Print events as they come; the exit code says whether the job finished."""
    last: Event | None = None
    others = False
    try:
        async for event in job.stream(from_offset=offset):
            last = event
            others |= event.choice > 0
            _print_event(event, output)
    except asyncio.CancelledError:
        where = last.end if last is not None else offset
        base.note(
            f"\nthe job goes on; see the rest with: tokenfleet stream {job.id} "
            f"--from-offset {where}"
        )
        raise
    if output is Output.TEXT:
        typer.echo("")
        if others:
            base.note(f"this is the first sample; see all with: tokenfleet result {job.id}")
    if last is None or last.finish_reason in ("stop", "length"):
        return base.OK
    reason = last.error.message if last.error is not None else f"the job was {last.finish_reason}"
    base.say_error(last.error.code if last.error else str(last.finish_reason), reason, output)
    return base.SOME_FAILED


def _print_event(event: Event, output: Output) -> None:
    if output is Output.JSON:
        base.print_json(event_as_dict(event))
    elif event.choice == 0 and event.text:
        typer.echo(event.text, nl=False)
        sys.stdout.flush()


def event_as_dict(event: Event) -> dict[str, Any]:
    described: Mapping[str, Any] = {
        "offset": event.offset,
        "choice": event.choice,
        "attempt": event.attempt,
        "text": event.text,
        "token_ids": event.token_ids,
        "finish_reason": event.finish_reason,
        "final": event.final,
        "error": None
        if event.error is None
        else {"code": event.error.code, "message": event.error.message},
    }
    return dict(described)


async def wait(job: AsyncJob, output: Output) -> int:
    """Print the result when it is there."""
    try:
        found = await job.result(timeout_s=None)
    except asyncio.CancelledError:
        base.note(f"the job goes on; see it with: tokenfleet result {job.id} --timeout-s 60")
        raise
    return print_result(job.id, found, output)


def print_result(job_id: str, found: JobResult, output: Output) -> int:
    if output is Output.JSON:
        base.print_json(result_as_dict(job_id, found))
        return base.OK
    for number, choice in enumerate(found.choices):
        if len(found.choices) > 1:
            base.note(f"[{number}]")
        typer.echo(choice.text)
    return base.OK


def result_as_dict(job_id: str, found: JobResult) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "model": found.model,
        "worker": found.worker,
        "attempts": found.attempts,
        "choices": [
            {
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
            }
            for choice in found.choices
        ],
        "usage": {
            "prompt_tokens": found.usage.prompt_tokens,
            "completion_tokens": found.usage.completion_tokens,
            "total_tokens": found.usage.total_tokens,
        },
        "timings": {
            "queue_s": found.timings.queue_s,
            "first_token_s": found.timings.first_token_s,
            "total_s": found.timings.total_s,
        },
        "metadata": found.metadata,
    }
