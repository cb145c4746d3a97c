"""The command line. Each command is one function in a module that owns its subject.

Importing this module loads nothing heavy: a command imports what it needs when it runs, so that
`tokenfleet worker` starts as fast as its model loads and `tokenfleet submit` needs no torch.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, cast

import typer

from tokenfleet.worker.commands import acl as cli_acl
from tokenfleet.worker.commands import base
from tokenfleet.worker.commands import batch as cli_batch
from tokenfleet.worker.commands import batch_begun as cli_batch_begun
from tokenfleet.worker.commands import bench as cli_bench
from tokenfleet.worker.commands import bench_peers as cli_bench_peers
from tokenfleet.worker.commands import bench_scaling as cli_bench_scaling
from tokenfleet.worker.commands import bench_telemetry as cli_bench_telemetry
from tokenfleet.worker.commands import config as cli_config
from tokenfleet.worker.commands import dead as cli_dead
from tokenfleet.worker.commands import demo as cli_demo
from tokenfleet.worker.commands import gateway as cli_gateway
from tokenfleet.worker.commands import jobs as cli_jobs
from tokenfleet.worker.commands import queues as cli_queue
from tokenfleet.worker.commands import rules as cli_rules
from tokenfleet.worker.commands import top as cli_top
from tokenfleet.worker.commands import worker as cli_worker
from tokenfleet.worker.commands.base import Output
from tokenfleet.worker.commands.options import flat

EXAMPLES = {
    "worker": "tokenfleet worker --model ./SmolLM2-135M-Instruct --model-name smollm2",
    "submit": 'tokenfleet submit --stream "Why is the sky blue?"',
    "stream": "tokenfleet stream 0199c2f0-2b7e-7c61-9d3c-0a4b5c6d7e8f.0 --from-offset 40",
    "result": "tokenfleet result 0199c2f0-2b7e-7c61-9d3c-0a4b5c6d7e8f.0 --timeout-s 30 -o json",
    "cancel": "tokenfleet cancel 0199c2f0-2b7e-7c61-9d3c-0a4b5c6d7e8f.0",
    "batch": "tokenfleet batch run requests.jsonl",
    "batch run": "tokenfleet batch run requests.jsonl --skip-invalid --ordered",
    "batch validate": "tokenfleet batch validate requests.jsonl -o json",
    "batch submit": "tokenfleet batch submit prompts.jsonl --model smollm2 --max-tokens 64",
    "batch status": "tokenfleet batch status requests.output.jsonl",
    "batch watch": "tokenfleet batch watch requests.output.jsonl",
    "batch results": "tokenfleet batch results requests.output.jsonl -o json",
    "batch cancel": "tokenfleet batch cancel requests.output.jsonl",
    "batch resume": "tokenfleet batch resume requests.output.jsonl",
    "queue": "tokenfleet queue list",
    "queue list": "tokenfleet queue list -o json",
    "queue depth": "tokenfleet queue depth --model smollm2",
    "queue ensure": "tokenfleet queue ensure smollm2",
    "queue limit": "tokenfleet queue limit acme --running 16 --waiting 10000",
    "queue pause": "tokenfleet queue pause smollm2 --priority batch",
    "queue resume": "tokenfleet queue resume smollm2",
    "dead": "tokenfleet dead list",
    "dead list": "tokenfleet dead list --limit 10",
    "dead show": "tokenfleet dead show 0199c2f0-2b7e-7c61-9d3c-0a4b5c6d7e8f.0",
    "dead replay": "tokenfleet dead replay --all",
    "dead drop": "tokenfleet dead drop 0199c2f0-2b7e-7c61-9d3c-0a4b5c6d7e8f.0",
    "config": "tokenfleet config show",
    "config show": "tokenfleet config show --changed -o json",
    "doctor": "tokenfleet doctor --redis-url redis://localhost:6379/0",
    "acl": "tokenfleet acl worker --namespace tokenfleet",
    "top": "tokenfleet top --interval-s 1",
    "gateway": "tokenfleet gateway --port 8000 --keys-file keys.toml",
    "demo": "tokenfleet demo",
    "bench": "tokenfleet bench engine -n 8",
    "bench engine": "tokenfleet bench engine -n 8 --compare transformers --json figures.json",
    "bench fleet": "tokenfleet bench fleet -n 8 -n 32",
    "bench features": "tokenfleet bench features",
    "bench scaling": "tokenfleet bench scaling -n 1 -n 2 -n 8",
    "bench gateway": "tokenfleet bench gateway -n 40",
    "bench telemetry": "tokenfleet bench telemetry --protocol http",
    "bench queue": "tokenfleet bench queue --json figures.json",
    "bench peers": "tokenfleet bench peers -n 8 --repeats 2 --json figures.json",
    "bench quality": "tokenfleet bench quality",
}
"""One line per command that works as it stands."""

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Group:
    """Commands of one subject."""

    about: str
    commands: Mapping[str, Command]


COMMANDS: Mapping[str, Command | Group] = {
    "submit": cli_jobs.submit,
    "stream": cli_jobs.stream,
    "result": cli_jobs.result,
    "cancel": cli_jobs.cancel,
    "batch": Group(
        "Files of requests, and of responses.",
        {
            "run": cli_batch.batch_run,
            "validate": cli_batch.batch_validate,
            "submit": cli_batch.batch_submit,
            "status": cli_batch_begun.batch_status,
            "watch": cli_batch_begun.batch_watch,
            "results": cli_batch_begun.batch_results,
            "cancel": cli_batch_begun.batch_cancel,
            "resume": cli_batch_begun.batch_resume,
        },
    ),
    "queue": Group(
        "The jobs that wait and run.",
        {
            "list": cli_queue.queue_list,
            "depth": cli_queue.queue_depth,
            "ensure": cli_queue.queue_ensure,
            "limit": cli_rules.queue_limit,
            "pause": cli_rules.queue_pause,
            "resume": cli_rules.queue_resume,
        },
    ),
    "dead": Group(
        "The jobs that were given up.",
        {
            "list": cli_dead.dead_list,
            "show": cli_dead.dead_show,
            "replay": cli_dead.dead_replay,
            "drop": cli_dead.dead_drop,
        },
    ),
    "config": Group("What a worker is started with.", {"show": cli_config.config_show}),
    "doctor": cli_queue.doctor,
    "acl": cli_acl.acl,
    "top": cli_top.top,
    "gateway": cli_gateway.gateway,
    "demo": cli_demo.demo,
    "bench": Group(
        "What this machine does, in figures.",
        {
            "engine": cli_bench.bench_engine,
            "fleet": cli_bench.bench_fleet,
            "features": cli_bench.bench_features,
            "scaling": cli_bench_scaling.bench_scaling,
            "gateway": cli_gateway.bench_gateway,
            "telemetry": cli_bench_telemetry.bench_telemetry,
            "queue": cli_bench.bench_queue,
            "peers": cli_bench_peers.bench_peers,
            "quality": cli_bench_peers.bench_quality,
        },
    ),
}
"""All of them but `worker`, in the order in which they are listed."""

ABOUT = """LLM jobs through Redis: exactly-once token streams from a fleet of workers.

\b
In one terminal, with a server and a small model brought along:
  tokenfleet worker --embedded
in another one:
  tokenfleet submit --stream "Why is the sky blue?"
"""

UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
"""What the library raises of words that it cannot use. It does not offer the name."""

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


def build(arguments: list[str]) -> typer.Typer:
    """The application. `worker` gets its setting flags only when asked for: they cost time."""
    app = _group(ABOUT)
    app.callback()(_root)
    asked_for_worker = next((a for a in arguments if not a.startswith("-")), None) == "worker"
    serve = (
        cli_worker.with_setting_flags(cli_worker.worker)
        if asked_for_worker
        else cli_worker.without_setting_flags(cli_worker.worker)
    )
    _add(app, "worker", serve)
    for name, found in COMMANDS.items():
        if callable(found):
            _add(app, name, found)
            continue
        group = _group(found.about, app, name)
        for verb, command in found.commands.items():
            _add(group, verb, command, name)
    return app


def _group(text: str, parent: typer.Typer | None = None, name: str = "") -> typer.Typer:
    group = typer.Typer(
        help=text,
        short_help=_first_paragraph(text),
        no_args_is_help=True,
        rich_markup_mode=None,  # boxes cut the names of options in terminals of 80 columns
        pretty_exceptions_enable=False,
        add_completion=parent is None,
        context_settings=SETTINGS,
        epilog=_example(name) if name else None,
    )
    if parent is not None:
        parent.add_typer(group, name=name)
    return group


def _add(app: typer.Typer, name: str, command: Command, group: str = "") -> None:
    app.command(
        name,
        short_help=_first_paragraph(inspect.cleandoc(command.__doc__ or "")),
        epilog=_example(f"{group} {name}".strip()),
        context_settings=cli_gateway.PASS_ON if command is cli_gateway.gateway else SETTINGS,
    )(flat(command))


def _example(name: str) -> str:
    """One line, however wide the terminal: it is there to be copied."""
    return f"\b\nExample:\n  {EXAMPLES[name]}"


def _first_paragraph(text: str) -> str:
    """What a list of commands says of one: in full, where the library would cut it."""
    return " ".join(text.partition("\n\n")[0].split())


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("tokenfleet"))
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def typed() -> list[str]:
    """The words behind `tokenfleet`, also where a shell asks how they may go on."""
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS")
    if words and "_TOKENFLEET_COMPLETE" in os.environ:
        return words.split()[1:]
    return sys.argv[1:]


def asks_for_json(words: list[str]) -> bool:
    """Whether `-o json` is among the words; what else is wrong with them is told as JSON then."""
    before = words[: words.index("--")] if "--" in words else words
    pairs = {("-o", "json"), ("--output", "json")}
    joined = {"-ojson", "--output=json"}
    return not joined.isdisjoint(before) or not pairs.isdisjoint(pairwise(before))


def main() -> None:
    """Entry point of the `tokenfleet` command."""
    words = typed()
    output = Output.JSON if asks_for_json(words) else Output.TEXT
    try:
        sys.exit(_run(words, output))
    except Exception as error:
        from tokenfleet.producer.errors import TokenfleetError

        if not isinstance(error, TokenfleetError):
            raise
        base.say_error(type(error).__name__, str(error), output)
        sys.exit(base.code_of(error))


def _run(words: list[str], output: Output) -> int | None:
    """The exit code. What the library says of words that it cannot use is told as was asked for."""
    app = build(words)
    if output is Output.TEXT:
        app(prog_name="tokenfleet")
        return None
    try:
        code: int | None = app(prog_name="tokenfleet", standalone_mode=False)
    except UsageError as error:
        base.say_error(type(error).__name__, error.format_message(), Output.JSON)
        return error.exit_code
    return code


if __name__ == "__main__":
    main()
