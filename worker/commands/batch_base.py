"""What the batch commands share: options, opening, running, and which outcome is which exit code.

0 all lines completed, 1 some failed or are left, 2 the input may not run, 3 Redis is away, 4 the
time was up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Broker, Output

if TYPE_CHECKING:
    from tokenfleet.producer.batch import Batch, Problem, Summary
    from tokenfleet.producer.client import AsyncClient

LOOK_AFTER_S = 5.0
"""After which a batch is said to wait for a model that no live worker serves."""
Found = TypeVar("Found")

Begun = Annotated[
    Path,
    typer.Argument(help="Output file of a batch that was begun, or its input.", show_default=False),
]
PatienceS = Annotated[
    float, typer.Option(min=0, help="How long Redis may be away before this gives up.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of a bar, on a terminal too.")]


@dataclass(frozen=True, slots=True)
class Way:
    """How a command runs a batch to its end."""

    in_flight: Annotated[int, typer.Option(min=1, help="Most jobs on their way at once.")] = 4096
    patience_s: PatienceS = 300.0
    timeout_s: Annotated[
        float | None, typer.Option(min=0, help="Stop after this long; `resume` goes on.")
    ] = None
    plain: Plain = False


WAY = Way()


async def run_batch(batch: Batch, client: AsyncClient, output: Output, way: Way) -> int:
    from tokenfleet.producer.batch import Phase
    from tokenfleet.worker.commands.batch_view import shown
    from tokenfleet.worker.commands.unserved import said_if_unserved

    if batch.state.phase is Phase.COMPLETED:
        base.note("it was completed before: nothing is run")
        return print_summary(await asyncio.to_thread(batch.summary), output)
    try:
        with shown(batch.state.lines, plain=way.plain) as view:
            looking = said_if_unserved(client, batch.state.model, after_s=LOOK_AFTER_S)
            async with asyncio.timeout(way.timeout_s), looking:
                summary = await batch.run(
                    client,
                    on_progress=view.show,
                    in_flight=way.in_flight,
                    patience_s=way.patience_s,
                )
    except TimeoutError:
        raise TimeoutError(_go_on(batch)) from None
    except OSError as error:
        base.say_error("Unwritable", f"{error.strerror}; {_go_on(batch)}", output)
        return base.BAD_INPUT
    except asyncio.CancelledError:
        base.note(_go_on(batch))
        raise
    return print_summary(summary, output)


def _go_on(batch: Batch) -> str:
    return f"not at its end; go on with: tokenfleet batch resume {batch.files.output}"


def run_to_end(batch: Batch, output: Output, broker: Broker, way: Way) -> None:
    """Connect and run a batch, as the whole of a command."""

    async def work(client: AsyncClient) -> int:
        return await run_batch(batch, client, output, way)

    base.run(base.with_client(work, broker), output)


def opened(path: Path, output: Output) -> Batch:
    from tokenfleet.producer.batch import Batch, find_files

    return checked(lambda: Batch.open(find_files(path)), output)


def checked(call: Callable[[], Found], output: Output) -> Found:
    """The call's answer; what is wrong with a batch or a file is exit code 2."""
    from tokenfleet.producer.batch import BatchError, BatchRefused
    from tokenfleet.producer.errors import InvalidJob

    try:
        return call()
    except BatchRefused:
        raise
    except (BatchError, InvalidJob) as error:
        base.fail(error, output)
    except OSError as error:
        unreadable(Path(error.filename or "?"), error, output)


def unreadable(path: Path, error: OSError, output: Output) -> NoReturn:
    """Says which file cannot be read or, where we are to make it, written."""
    if path.suffix == ".tmp":
        said = f"nothing can be written into {path.absolute().parent}: {error.strerror}"
        base.say_error("Unwritable", said, output)
    else:
        base.say_error("Unreadable", f"{path} cannot be read: {error.strerror}", output)
    raise typer.Exit(base.BAD_INPUT) from None


def sentence(problem: Problem) -> str:
    where = "file" if problem.line is None else f"line {problem.line}"
    which = "" if problem.custom_id is None else f" [{problem.custom_id}]"
    level = "warning: " if problem.kind == "warning" else ""
    return f"{where}{which}: {level}{problem.code}: {problem.message}"


def print_glance(batch: Batch, output: Output) -> None:
    from tokenfleet.worker.commands.batch_view import glance_rows

    found = batch.glance()
    if output is Output.JSON:
        base.print_json(found.as_dict())
        return
    for name, value in glance_rows(found):
        typer.echo(f"{name:10} {value}")


def print_summary(summary: Summary, output: Output) -> int:
    from tokenfleet.worker.commands.batch_view import summary_rows

    if output is Output.JSON:
        base.print_json(summary.as_dict())
    else:
        for name, value in summary_rows(summary):
            typer.echo(f"{name:10} {value}")
    return base.SOME_FAILED if summary.failed or summary.left else base.OK
