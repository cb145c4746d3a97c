"""`tokenfleet worker`: every setting is a flag, made from the settings themselves.

The flags and the settings cannot drift apart, and one validator judges both: a flag's text goes to
pydantic as an environment variable's does.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import os
import re
import socket
import textwrap
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin
from urllib.parse import urlsplit

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output
from tokenfleet.worker.loops import fastest_loop

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from tokenfleet.producer.embedded import EmbeddedServer
    from tokenfleet.worker.settings import WorkerSettings

DEMO_NAME = "smollm2"
_HERE = ("localhost", "127.0.0.1", "::1")
UNSET = re.compile(r"[;,] None = ([^.;]+)\.$")
HIDDEN = ("fault", "step_log")
"""Settings that are hooks of the tests and benches."""


class LogFormat(StrEnum):
    """Of a worker's log."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


def worker(
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded", help="Bring a Redis-compatible server along, and the demo model if none."
        ),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(envvar="TOKENFLEET_CONFIG", help="TOML file of settings.")
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="auto: console on a terminal.")
    ] = LogFormat.AUTO,
    **flags: Any,
) -> None:
    """Serve a model: take jobs from the queue into free slots, stream their tokens back.

    Every setting (from --redis-url on) is also TOKENFLEET_<NAME> in the environment, and a line
    of the file that --config names; `tokenfleet config show` says which came from where.
    """
    from tokenfleet.worker.settings import SettingsError, load_settings, unknown_variables

    if config is not None:
        os.environ["TOKENFLEET_CONFIG"] = str(config)
    for name in unknown_variables():
        base.note(f"warning: this is no setting of tokenfleet: {name}")
    server: EmbeddedServer | None = None
    try:
        if embedded:
            flags, server = _bring_along(flags)
        settings = load_settings(**flags)
        _check_model(settings)
    except SettingsError as error:
        if server is not None:
            server.stop()
        base.say_error("SettingsError", str(error), Output.TEXT)
        raise typer.Exit(base.BAD_INPUT) from None
    if server is not None:
        base.note(f"in another terminal: {_first_command(settings)}")
    try:
        raise typer.Exit(_serve(settings, log_format.value))
    finally:
        if server is not None:
            server.stop()


def _check_model(settings: WorkerSettings) -> None:
    """Raises SettingsError for what is no checkpoint at first sight."""
    from tokenfleet.worker.settings import SettingsError

    simulated = settings.simulated_step_ms is not None  # that needs a tokenizer only
    if not settings.model.is_dir():
        raise SettingsError(
            "model must be a directory with config.json, safetensors and tokenizer.json, got "
            f"{str(settings.model)!r}; download first what is on a hub"
        )
    if not simulated and not (settings.model / "config.json").exists():
        raise SettingsError(
            f"model must be a Hugging Face checkpoint, but {settings.model} has no config.json"
        )


def with_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one more option per setting. Imports pydantic-settings: call it late."""
    from tokenfleet.worker.settings import WorkerSettings

    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    texts = setting_texts(WorkerSettings)
    settings = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_flag(name, field, texts.get(name, "")),
        )
        for name, field in WorkerSettings.model_fields.items()
    ]

    def with_flags(**given: Any) -> None:
        command(**given)

    with_flags.__doc__ = command.__doc__
    with_flags.__signature__ = signature.replace(  # type: ignore[attr-defined]  # as inspect documents it
        parameters=[p.replace(kind=p.KEYWORD_ONLY) for p in own] + settings
    )
    with_flags.__annotations__ = {p.name: p.annotation for p in own + settings}
    return with_flags


def without_setting_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command as a list of commands needs it: its name and its sentence."""

    def listed() -> None:
        command()

    listed.__doc__ = command.__doc__
    return listed


def setting_texts(settings: type[WorkerSettings]) -> dict[str, str]:
    """The text under each field's declaration."""
    body = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for declared, text in zip(body.body, body.body[1:]):
        if (
            isinstance(declared, ast.AnnAssign)
            and isinstance(declared.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            texts[declared.target.id] = " ".join(str(text.value.value).split())
    return texts


def _flag(name: str, field: FieldInfo, text: str) -> Any:
    word = name.replace("_", "-")
    kind: Any = str
    spelled = f"--{word}"
    if field.annotation is bool:
        kind, spelled = bool, f"--{word}/--no-{word}"
    option = typer.Option(
        spelled,
        help=_with_default(text, field),
        metavar=None if kind is bool else _metavar(field.annotation),
        show_default=False,
        hidden=name in HIDDEN,
    )
    return Annotated[kind | None, option]


def _with_default(text: str, field: FieldInfo) -> str:
    """The text of a setting, and what it is when nothing is said: `None` is no word of a shell."""
    if field.is_required():
        return f"{text}  [required]"
    unset = UNSET.search(text)
    if unset is not None:
        return f"{text[: unset.start()]}.  [default: {unset[1]}]"
    shown = ("off", "on")[field.default] if isinstance(field.default, bool) else field.default
    return text if shown is None else f"{text}  [default: {shown}]".strip()


def _metavar(annotation: Any) -> str:
    """What to write for a type: int -> <int>, Literal -> <a|b>, Path | None -> <path>."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if parts and isinstance(parts[0], str):
        return f"<{'|'.join(parts)}>"
    if get_origin(annotation) is Annotated or len(parts) == 1:
        return _metavar(parts[0])
    names = {int: "int", float: "float", Path: "path", bool: "true|false"}
    return f"<{names.get(annotation, 'str')}>"


def _bring_along(flags: dict[str, Any]) -> tuple[dict[str, Any], EmbeddedServer]:
    """Start the embedded server where redis_url says, and fill in the demo model."""
    from tokenfleet.producer.embedded import EmbeddedServer

    port = _port_here(flags.get("redis_url") or base.DEFAULT_URL)
    given = dict(flags)
    if given.get("model") is None:
        base.note("preparing SmolLM2-135M-Instruct (cached after the first time)")
        given["model"] = str(base.demo_model())
        given["model_name"] = given.get("model_name") or DEMO_NAME
    if _taken(port):
        base.say_error(
            "PortTaken",
            f"port {port} is in use; leave out --embedded to use what listens there, "
            "or give another one: --redis-url redis://localhost:6380/0",
            Output.TEXT,
        )
        raise typer.Exit(base.BAD_INPUT)
    server = EmbeddedServer(port=port).start()
    given["redis_url"] = server.url
    base.note(f"embedded server at {server.url}")
    return given, server


def _port_here(redis_url: str) -> int:
    """The port of a URL that an embedded server can have. Raises SettingsError."""
    from tokenfleet.producer.address import SINGLE, parse_address
    from tokenfleet.producer.errors import BrokerUnsupported, InvalidJob
    from tokenfleet.worker.settings import SettingsError

    try:
        address = parse_address(redis_url)
    except (InvalidJob, BrokerUnsupported) as error:
        raise SettingsError(str(error)) from None
    elsewhere = address.kind != SINGLE or address.tls or address.hosts[0][0] not in _HERE
    if elsewhere or address.options.keys() & {"username", "password"}:
        raise SettingsError(
            "--embedded brings a server on this machine, without TLS and password: leave out "
            "--redis-url, or give redis://localhost:PORT/0"
        )
    return address.hosts[0][1]


def _first_command(settings: WorkerSettings) -> str:
    """What somebody who has just started a worker and its server may type next."""
    options = "" if settings.served_name == DEMO_NAME else f" --model {settings.served_name}"
    if urlsplit(settings.redis_url).port != urlsplit(base.DEFAULT_URL).port:
        options += f" --redis-url {settings.redis_url}"
    return f'tokenfleet submit --stream "Why is the sky blue?"{options}'


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _keep_loaded() -> None:
    """What is loaded stays: a full collection that visits it stops every stream for 85 ms."""
    gc.collect()
    gc.freeze()


def _serve(settings: WorkerSettings, log_format: str) -> int:
    """Run the service on the fastest event loop there is; its exit code."""
    from tokenfleet.worker.engine_link.engine_process import new_engine

    engine = new_engine(settings)
    engine.launch()  # it loads its libraries while we load ours
    from tokenfleet.worker.observing import logs
    from tokenfleet.worker.service import WorkerService

    async def serve() -> int:
        try:
            service = WorkerService(
                settings, started=started_at(), first_engine=engine, loaded=_keep_loaded
            )
        except (ValueError, OSError) as error:  # OSError: trace_file cannot be written
            base.say_error("SettingsError", str(error), Output.TEXT)
            return base.BAD_INPUT
        logs.configure(
            level=settings.log_level,
            log_format=log_format,
            worker=service.worker_id,
            trace_ids=service.telemetry.trace_ids,
        )
        return await service.run()

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        return runner.run(serve())


def started_at() -> float:
    """When this process began, on the monotonic clock; now, where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        age_s = 0.0
    return time.monotonic() - age_s
