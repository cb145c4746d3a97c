"""Commands about one job: submit, stream, result, cancel.

Text that streams is written as it comes and nothing else goes to standard output, so that a pipe
gets exactly what the model said. Interrupting a command never ends a job; `cancel` does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Namespace, Output, OutputOption, RedisUrl

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncClient, AsyncJob, Event, JobResult

JobId = Annotated[str, typer.Argument(help="What submit printed.", show_default=False)]
Timeout = Annotated[
    float | None, typer.Option(min=0, help="Give up waiting after this long; the job goes on.")
]


FETCH_S = 10.0
"""Long enough to fetch a result that is there."""


class Priority(StrEnum):
    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"


def submit(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; `-` or nothing reads it from standard input."),
    ] = None,
    model: Annotated[
        str, typer.Option(envvar="TOKENFLEET_MODEL_NAME", help="What workers serve it as.")
    ] = "smollm2",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw", help="As a chat message through the model's template, or as it is."
        ),
    ] = True,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it is made.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Print the text when it is done.")] = False,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most output tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=-1, help="0: off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=128, help="Samples.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends it; repeatable.")] = None,
    priority: Annotated[Priority, typer.Option()] = Priority.INTERACTIVE,
    tenant: Annotated[str, typer.Option(envvar="TOKENFLEET_TENANT")] = "default",
    deadline_s: Annotated[float | None, typer.Option(help="Expire after this long.")] = None,
    delay_s: Annotated[float, typer.Option(min=0, help="Not before this long.")] = 0.0,
    idempotency_key: Annotated[
        str | None, typer.Option(help="The same key again gives the same job.")
    ] = None,
    timeout_s: Timeout = None,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Put a job into the queue; with --stream, print its text as it is made."""
    text = _prompt_text(prompt)
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "n": n,
        "stop": tuple(stop or ()),
    }
    asked: dict[str, Any] = {
        "model": model,
        "priority": priority.value,
        "deadline_s": deadline_s,
        "delay_s": delay_s,
        "idempotency_key": idempotency_key,
        **_prompt_fields(text, chat=chat, system=system),
    }

    async def work() -> int:
        from tokenfleet.producer import AsyncClient, SamplingParams

        asked["sampling"] = SamplingParams(**sampling)
        async with AsyncClient(
            redis_url,
            namespace=namespace,
            tenant=tenant,
            connect_timeout_s=base.CONNECT_TIMEOUT_S,
        ) as client:
            job = await client.submit(**asked)
            if not stream and not wait:
                return _print_id(job, output)
            if output is Output.TEXT:
                base.note(f"job {job.id}")
            async with asyncio.timeout(timeout_s):
                return await (_follow(job, 0, output) if stream else _wait(job, output))

    base.run(work(), output)


def stream(
    job_id: JobId,
    from_offset: Annotated[
        int, typer.Option(min=0, help="Skip this many output tokens already seen.")
    ] = 0,
    timeout_s: Timeout = None,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Follow a job from its beginning (or an offset) to its end."""

    async def work(client: AsyncClient) -> int:
        async with asyncio.timeout(timeout_s):
            return await _follow(client.job(job_id), from_offset, output)

    base.run(_with_client(work, redis_url, namespace), output)


def result(
    job_id: JobId,
    timeout_s: Annotated[float, typer.Option(min=0, help="Wait at most this long.")] = 0.0,
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print what a job came to, waiting for its end if told to."""

    async def work(client: AsyncClient) -> int:
        from tokenfleet.producer import ResultTimeout

        job = client.job(job_id)
        if not timeout_s and not (status := await job.status()).state.terminal:
            raise ResultTimeout(job_id, 0.0, status.state)
        found = await job.result(timeout_s=timeout_s or FETCH_S)
        return _print_result(job_id, found, output)

    base.run(_with_client(work, redis_url, namespace), output)


def cancel(
    job_ids: Annotated[list[str], typer.Argument(help="Job ids.", show_default=False)],
    redis_url: RedisUrl = base.DEFAULT_URL,
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """End jobs, waiting or running; one that has ended stays as it is.

    The state shown is the one at once: `running` means that its worker has been told.
    """

    async def work(client: AsyncClient) -> int:
        rows = []
        for job_id in job_ids:
            state = await client.job(job_id).cancel()
            rows.append({"job_id": job_id, "state": state.value})
        base.print_rows(("job_id", "state"), rows, output, empty="")
        return base.OK

    base.run(_with_client(work, redis_url, namespace), output)


async def _with_client(work: Any, redis_url: str, namespace: str) -> int:
    from tokenfleet.producer import AsyncClient

    async with AsyncClient(
        redis_url, namespace=namespace, connect_timeout_s=base.CONNECT_TIMEOUT_S
    ) as client:
        code: int = await work(client)
        return code


def _prompt_text(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return prompt or ""
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter(
            "give one, or `-` to read it from standard input", param_hint="PROMPT"
        )
    return sys.stdin.read()


def _prompt_fields(text: str, *, chat: bool, system: str | None) -> dict[str, Any]:
    if not text.strip():
        raise typer.BadParameter("must not be empty", param_hint="PROMPT")
    if not chat:
        if system is not None:
            raise typer.BadParameter("needs --chat", param_hint="--system")
        return {"prompt": text}
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def _print_id(job: AsyncJob, output: Output) -> int:
    if output is Output.JSON:
        base.print_json({"job_id": job.id, "deduplicated": job.deduplicated})
    else:
        typer.echo(job.id)
    return base.OK


async def _follow(job: AsyncJob, offset: int, output: Output) -> int:
    """Print events as they come; the exit code says whether the job finished."""
    last: Event | None = None
    try:
        async for event in job.stream(from_offset=offset):
            last = event
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


async def _wait(job: AsyncJob, output: Output) -> int:
    return _print_result(job.id, await job.result(timeout_s=None), output)


def _print_result(job_id: str, found: JobResult, output: Output) -> int:
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
