"""Commands about one job: submit, stream, result, cancel.

Interrupting a command never ends a job; `cancel` does.
"""

from __future__ import annotations

import asyncio
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Broker, Output, OutputOption
from tokenfleet.worker.commands.job_view import follow, print_id, print_result, wait

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncClient

JobId = Annotated[str, typer.Argument(help="The id that `submit` printed.", show_default=False)]
Timeout = Annotated[
    float | None, typer.Option(min=0, help="Give up waiting after this long; the job goes on.")
]


FETCH_S = 10.0
"""Long enough to fetch a result that is there."""


class Priority(StrEnum):
    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"


PriorityOption = Annotated[
    Priority, typer.Option(help="Class: interactive is served first, batch makes way.")
]
Tenant = Annotated[
    str, typer.Option(envvar="TOKENFLEET_TENANT", help="Whose limits and turn the jobs count for.")
]


def submit(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; `-` or nothing reads it from standard input."),
    ] = None,
    model: Annotated[
        str, typer.Option(envvar="TOKENFLEET_MODEL_NAME", help="Name that workers serve it as.")
    ] = "smollm2",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw", help="As a chat message through the model's template, or as it is."
        ),
    ] = True,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it is made.")] = False,
    wait_for_end: Annotated[
        bool, typer.Option("--wait", help="Print the text when it is done.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=0, help="Most output tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Only the likeliest tokens of this mass; 1: all.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=-1, help="Only that many likeliest tokens; 0: all.")
    ] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=128, help="Samples.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends it; repeatable.")] = None,
    priority: PriorityOption = Priority.INTERACTIVE,
    tenant: Tenant = "default",
    deadline_s: Annotated[
        float | None, typer.Option(help="Ended as expired when it is not done after this long.")
    ] = None,
    delay_s: Annotated[float, typer.Option(min=0, help="Not before this long.")] = 0.0,
    idempotency_key: Annotated[
        str | None, typer.Option(help="The same key again gives the same job.")
    ] = None,
    timeout_s: Timeout = None,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Put a job into the queue and print its id; with --stream, print its text as it is made."""
    if timeout_s is not None and not (stream or wait_for_end):
        raise typer.BadParameter("needs --wait or --stream", param_hint="--timeout-s")
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
        from tokenfleet.producer import SamplingParams
        from tokenfleet.worker.commands.unserved import said_if_unserved

        asked["sampling"] = SamplingParams(**sampling)
        async with base.new_client(broker, tenant) as client:
            job = await client.submit(**asked)
            if not stream and not wait_for_end:
                return print_id(job, output)
            if output is Output.TEXT:
                base.note(f"job {job.id}")
            async with asyncio.timeout(timeout_s), said_if_unserved(client, model):
                return await (follow(job, 0, output) if stream else wait(job, output))

    base.run(work(), output)


def stream(
    job_id: JobId,
    from_offset: Annotated[
        int, typer.Option(min=0, help="Skip this many output tokens already seen.")
    ] = 0,
    timeout_s: Timeout = None,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Follow a job from its beginning (or an offset) to its end."""

    async def work(client: AsyncClient) -> int:
        async with asyncio.timeout(timeout_s):
            return await follow(client.job(job_id), from_offset, output)

    base.run(base.with_client(work, broker), output)


def result(
    job_id: JobId,
    timeout_s: Annotated[
        float, typer.Option(min=0, help="Wait at most this long; 0: do not.")
    ] = 0.0,
    broker: Broker = base.BROKER,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print what a job came to, waiting for its end if told to."""

    async def work(client: AsyncClient) -> int:
        from tokenfleet.producer import ResultTimeout

        job = client.job(job_id)
        if not timeout_s and not (status := await job.status()).state.terminal:
            raise ResultTimeout(job_id, 0.0, status.state)
        found = await job.result(timeout_s=timeout_s or FETCH_S)
        return print_result(job_id, found, output)

    base.run(base.with_client(work, broker), output)


def cancel(
    job_ids: Annotated[list[str], typer.Argument(help="Job ids.", show_default=False)],
    broker: Broker = base.BROKER,
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

    base.run(base.with_client(work, broker), output)


def _prompt_text(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return prompt or ""
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter(
            "give one, or `-` to read it from standard input", param_hint="PROMPT"
        )
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"standard input is not UTF-8 ({error.reason} at byte {error.start})",
            param_hint="PROMPT",
        ) from None


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
