"""What all commands share: options, output as text or JSON, and which error is which exit code.

Exit codes: 0 ok, 1 some jobs failed, 2 bad input, 3 broker unreachable, 4 timeout. What a command
found goes to standard output, in the asked form only; everything said about it goes to standard
error.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from tokenfleet.producer.client import AsyncClient
    from tokenfleet.producer.connection import Connection

OK, SOME_FAILED, BAD_INPUT, UNREACHABLE, TIMED_OUT = range(5)
INTERRUPTED, TERMINATED = 130, 143


class Output(StrEnum):
    """How a command prints what it found."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="text for people, json for programs.")
]


def _checked_url(url: str) -> str:
    from tokenfleet.producer.address import parse_address
    from tokenfleet.producer.errors import BrokerUnsupported, InvalidJob

    try:
        parse_address(url)
    except InvalidJob as error:
        raise typer.BadParameter(f"{error.way_out}; got {error.value}") from None
    except BrokerUnsupported as error:
        raise typer.BadParameter(str(error)) from None
    return url


RedisUrl = Annotated[
    str,
    typer.Option(
        envvar="TOKENFLEET_REDIS_URL",
        help="redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
        callback=_checked_url,
    ),
]
Namespace = Annotated[
    str, typer.Option(envvar="TOKENFLEET_NAMESPACE", help="The fleet's prefix of all keys.")
]
DEFAULT_URL = "redis://localhost:6379/0"
_LOCAL = DEFAULT_URL.removesuffix("/0")
DEFAULT_NAMESPACE = "tokenfleet"


@dataclass(frozen=True, slots=True)
class Broker:
    """Where a fleet is: options of every command that talks to Redis."""

    redis_url: RedisUrl = DEFAULT_URL
    namespace: Namespace = DEFAULT_NAMESPACE


BROKER = Broker()
CONNECT_TIMEOUT_S = 3.0
"""How long a command tries to reach Redis."""
PARTITIONS = "TOKENFLEET_PARTITIONS"
"""Workers and gateways read it too: a job belongs where workers look."""


def run(work: Coroutine[Any, Any, int], output: Output) -> NoReturn:
    """Run a command to its end and exit with its code; a typed error is a sentence and a code."""
    from tokenfleet.producer.errors import TokenfleetError

    try:
        code = asyncio.run(_until_told(work))
    except TokenfleetError as error:
        fail(error, output)
    except TimeoutError as error:
        say_error("timeout", str(error) or "the time was up", output)
        raise typer.Exit(TIMED_OUT) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        reader_gone()
    except OSError as error:  # a full disk below standard output, or a file that was asked for
        _close_stdout()
        where = "" if error.filename is None else f"{error.filename}: "
        say_error("Unwritable", f"{where}{error.strerror or error}", output)
        raise typer.Exit(BAD_INPUT) from None
    raise typer.Exit(code)


async def _until_told(work: Coroutine[Any, Any, int]) -> int:
    """The work's exit code. SIGTERM ends it as Ctrl-C does: it says what goes on without it."""
    if threading.current_thread() is not threading.main_thread():
        return await work  # only that one can hear of a signal
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    told = False

    def tell() -> None:
        nonlocal told
        told = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, tell)
    try:
        return await task
    except asyncio.CancelledError:
        if told:
            return TERMINATED
        raise  # Ctrl-C, of which asyncio has told the work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def reader_gone() -> NoReturn:
    """Whoever read our output has gone (`| head`): there is nothing left to say."""
    _close_stdout()
    raise typer.Exit(OK) from None


def _close_stdout() -> None:
    """What is left in its buffer goes nowhere: flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _partitions() -> int | None:
    said = os.environ.get(PARTITIONS, "").strip()
    if said and not (said.isascii() and said.isdecimal() and int(said)):
        raise typer.BadParameter(f"must be a number from 1, got {said!r}", param_hint=PARTITIONS)
    return int(said) if said else None


def new_client(broker: Broker, tenant: str = "default") -> AsyncClient:
    """A client of the fleet, not connected yet."""
    from tokenfleet.producer.client import AsyncClient

    return AsyncClient(
        broker.redis_url,
        namespace=broker.namespace,
        tenant=tenant,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        partitions=_partitions(),
    )


async def with_client(work: Callable[[AsyncClient], Awaitable[int]], broker: Broker) -> int:
    """The work's exit code, with a client that is closed afterwards."""
    async with new_client(broker) as client:
        return await work(client)


async def with_connection(
    work: Callable[[Connection], Awaitable[int]],
    broker: Broker,
    *,
    ready: bool = True,
) -> int:
    """The work's exit code, with a connection that is closed afterwards.

    Args:
        ready: a server that is not there or cannot be used ends the command before the work.
    """
    from tokenfleet.producer.connection import Connection

    connection = Connection(
        broker.redis_url,
        namespace=broker.namespace,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        partitions=_partitions(),
    )
    try:
        if ready:
            await connection.ready()
        return await work(connection)
    finally:
        await connection.aclose()


def fail(error: Exception, output: Output) -> NoReturn:
    """Say what went wrong and exit with the code of its kind."""
    from tokenfleet.producer.errors import BrokerUnavailable

    say_error(type(error).__name__, str(error), output)
    nowhere = isinstance(error, BrokerUnavailable) and f"{_LOCAL} was not reached" in str(error)
    if nowhere and output is Output.TEXT:
        note("where there is none, `tokenfleet worker --embedded` brings one along")
    raise typer.Exit(code_of(error)) from None


def code_of(error: Exception) -> int:
    """The exit code of a typed error."""
    from tokenfleet.producer import errors

    if isinstance(error, TimeoutError):
        return TIMED_OUT
    if isinstance(error, errors.BrokerUnavailable | errors.BrokerUnsupported):
        return UNREACHABLE
    if isinstance(error, errors.StreamInterrupted):
        return UNREACHABLE
    if isinstance(error, errors.JobEnded | errors.QueueFull):
        return SOME_FAILED
    return BAD_INPUT


def demo_model(output: Output = Output.TEXT) -> Path:
    """The demo's checkpoint, or the reason why there is none and exit code 2."""
    from tokenfleet.worker.demo.model import DemoModelError, prepare_smollm2

    try:
        return prepare_smollm2()
    except DemoModelError as error:
        fail(error, output)


def say_error(kind: str, message: str, output: Output) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps({"error": kind, "message": message}), err=True)
    else:
        typer.echo(f"error: {message}", err=True)


def measure(
    bench: Callable[[], dict[str, Any]], json_path: Path | None, output: Output
) -> dict[str, Any] | None:
    """What a bench found, written where it was asked for; None when a program has been given it.

    A bench that fails ends the command.
    """
    from tokenfleet.worker.bench.runs import BenchFailed

    try:
        found = bench()
    except BenchFailed as error:
        say_error("BenchFailed", str(error), output)
        raise typer.Exit(SOME_FAILED) from None
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n")
    if output is Output.JSON:
        print_json(found)
        return None
    return found


def note(message: str) -> None:
    """Something worth knowing that is not what was asked for."""
    typer.echo(message, err=True)


def print_json(value: object) -> None:
    typer.echo(json.dumps(_plain(value), ensure_ascii=False))


def _plain(value: object) -> object:
    """What JSON has for a value: null for odd numbers, text for bytes and for keys."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _key(key: object) -> str:
    text = _plain(key)
    return text if isinstance(text, str) else json.dumps(text)


def print_rows(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    output: Output,
    *,
    empty: str,
    show: Callable[[str, Any], str] = lambda _, value: "" if value is None else str(value),
    titles: Mapping[str, str] | None = None,
) -> None:
    """A list of alike things: a table for people, a JSON array for programs."""
    if output is Output.JSON:
        print_json(rows)
        return
    if not rows:
        note(empty)
        return
    from tokenfleet.worker.commands.tables import print_table

    known = {column: column.replace("_", " ") for column in columns} | dict(titles or {})
    print_table(
        [known[column] for column in columns],
        [[show(column, row.get(column)) for column in columns] for row in rows],
        whole=[known[column] for column in columns if column.endswith("job_id")],
    )
