"""Every command, found by walking them: an example that parses, JSON for programs, completion."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from click import Command
from typer.testing import CliRunner

from tokenfleet.producer.gateway.command import run as run_gateway
from tokenfleet.worker.commands.cli import EXAMPLES, build
from tokenfleet.worker.commands.cli import typed as words_so_far

SERVES = {"worker", "gateway", "top"}
"""Run until they are stopped: what they say are logs, or a screen."""


def commands() -> Iterator[tuple[str, Command]]:
    """Every command and group with its words."""

    def below(group: Any, words: str) -> Iterator[tuple[str, Command]]:
        for name, command in group.commands.items():
            path = f"{words} {name}".strip()
            yield path, command
            if hasattr(command, "commands"):
                yield from below(command, path)

    return below(typer.main.get_command(build(["worker"])), "")


ALL = dict(commands())
LEAVES = {path: command for path, command in ALL.items() if not hasattr(command, "commands")}


def test_every_command_is_there() -> None:
    wanted = {
        *("worker", "submit", "stream", "result", "cancel", "doctor", "top", "demo", "gateway"),
        *(f"batch {verb}" for verb in ("run", "validate", "submit", "status", "watch")),
        *(f"batch {verb}" for verb in ("results", "cancel", "resume")),
        *(f"queue {verb}" for verb in ("list", "depth", "pause", "resume", "ensure", "limit")),
        *(f"dead {verb}" for verb in ("list", "show", "replay", "drop")),
        *("config show", "bench engine", "bench fleet"),
    }
    assert wanted <= set(LEAVES)


def test_the_first_help_lists_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = CliRunner().invoke(build([]), ["--help"]).output
    assert {path for path in ALL if " " not in path and f" {path} " not in listed} == set()


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("path", sorted(set(LEAVES) - {"gateway"}))
def test_no_name_of_an_option_is_cut_in_a_narrow_terminal(path: str, columns: int) -> None:
    words = path.split()
    shown = CliRunner().invoke(build(words), [*words, "--help"], terminal_width=columns).output
    names = {
        name
        for parameter in LEAVES[path].params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--") and not getattr(parameter, "hidden", False)
    }
    assert names - set(shown.replace(",", " ").split()) == set()


def test_a_setting_is_shown_with_its_default_as_one_writes_it() -> None:
    said = CliRunner().invoke(build(["worker"]), ["worker", "--help"]).output
    shown = " ".join(said.split())
    assert "[default: redis://localhost:6379/0]" in shown
    assert "begin alike. [default: on]" in shown
    assert "OpenTelemetry collector. [default: no export]" in shown
    assert "None = " not in shown, "None is no word of a shell"


def test_a_setting_of_the_gateway_is_shown_with_its_default_as_one_writes_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run_gateway(["--help"], prog="tokenfleet gateway")
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("usage: tokenfleet gateway ")
    assert "Port to listen on; 0 = any free one. [default: 8000]" in shown
    assert "Serve /status, a page about the fleet. [default: on]" in shown
    assert "None = " not in shown


@pytest.mark.parametrize("path", sorted(set(LEAVES) - {"gateway"}))
def test_every_option_says_what_it_is_for(path: str) -> None:
    silent = [
        parameter.name
        for parameter in LEAVES[path].params
        if not getattr(parameter, "help", None) and not getattr(parameter, "hidden", False)
    ]
    assert silent == []


def test_an_example_is_one_line_to_copy_in_any_terminal() -> None:
    words = ["bench", "engine"]
    shown = CliRunner().invoke(build(words), [*words, "--help"], terminal_width=40).output
    assert EXAMPLES["bench engine"] in shown


@pytest.mark.parametrize("path", sorted(ALL))
def test_every_help_ends_with_an_example(path: str) -> None:
    words = path.split()
    shown = CliRunner().invoke(build(words), [*words, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    example = EXAMPLES[path].removeprefix("tokenfleet ").removeprefix(path)
    said = "".join(shown.output.split())
    assert "".join(example.split()) in said.rpartition("Example:")[2]


@pytest.mark.parametrize("path", sorted(ALL))
def test_every_example_is_of_its_command_and_parses(path: str) -> None:
    words = shlex.split(EXAMPLES[path])[1:]
    assert words[: len(path.split())] == path.split()
    command: Any = typer.main.get_command(build(words))
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(path, words)


@pytest.mark.parametrize("path", sorted(set(LEAVES) - SERVES))
def test_every_command_that_ends_has_json_for_programs(path: str) -> None:
    options = {name for parameter in LEAVES[path].params for name in parameter.opts}
    assert {"-o", "--output"} <= options or "--json" in options, path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tokenfleet ba", {"batch"}),
        ("tokenfleet batch re", {"results", "resume"}),
        ("tokenfleet queue ens", {"ensure"}),
        ("tokenfleet worker --max-num-s", {"--max-num-seqs"}),
        ("tokenfleet submit --priority ba", {"batch"}),
    ],
)
def test_a_shell_is_told_how_words_may_go_on(
    typed: str, offered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TOKENFLEET_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    done = CliRunner().invoke(build(words_so_far()), prog_name="tokenfleet")
    assert set(done.stdout.split()) == offered


def test_the_completion_of_the_shell_in_use_can_be_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    done = CliRunner().invoke(build([]), ["--show-completion"], prog_name="tokenfleet")
    assert (done.exit_code, "_TOKENFLEET_COMPLETE" in done.stdout) == (0, True)
