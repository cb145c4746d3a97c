"""What the README says is there, and runs as it is written."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.worker.commands.cli import EXAMPLES, build
from tokenfleet.worker.demo.model import prepare_smollm2

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
URL = "redis://localhost:6379/0"


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def ran(code: str, redis_url: str) -> str:
    """What the code prints, run as it is written but for the server's address."""
    assert code.count(URL) == 1, "only the address is replaced"
    done = subprocess.run(
        [sys.executable, "-c", code.replace(URL, redis_url)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def command_lines() -> list[str]:
    """Every `tokenfleet ...` in a shell block, in backquotes, and in the help's examples."""
    lines = [line.split("   #")[0] for block in blocks("sh") for line in block.splitlines()]
    quoted = re.findall(r"`(tokenfleet [^`]*)`", README)
    return sorted({line.strip() for line in [*lines, *quoted, *EXAMPLES.values()] if line.strip()})


@pytest.fixture
def redis_url() -> Iterator[str]:
    """A server with a worker on it that answers at once, with the demo model's tokenizer."""
    with EmbeddedServer() as server:
        flags = {
            "--redis-url": server.url,
            "--model": str(prepare_smollm2()),
            "--model-name": "smollm2",
            "--simulated-step-ms": "1",
            "--log-format": "json",
        }
        worker = subprocess.Popen(
            [
                *(sys.executable, "-m", "tokenfleet.worker.commands.cli", "worker"),
                *(part for flag in flags.items() for part in flag),
            ],
            stderr=subprocess.DEVNULL,
        )
        yield server.url
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=240) == 0


@pytest.mark.smollm2
def test_the_producer_code_runs_as_written(redis_url: str) -> None:
    code, _ = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 13
    assert ran(code, redis_url).rstrip().endswith("64 tokens, length, 1 attempt(s)")


@pytest.mark.smollm2
def test_what_the_producers_page_shows_backend_services_runs_as_written(redis_url: str) -> None:
    script, service = blocks("python", (ROOT / "producer/README.md").read_text())
    assert re.findall(r"(\d) and \1 is", ran(script, redis_url)) == ["0", "1", "2"]
    asked = (
        "from starlette.testclient import TestClient\n"
        "with TestClient(app) as web:\n"
        "    answer = web.post('/ask', json={'question': 'Why?'})\n"
        "    print(answer.status_code, answer.headers['x-job-id'], answer.text)\n"
    )
    assert re.match(r"200 [0-9a-f-]{36}\.0 .*Why\?", ran(service + asked, redis_url), re.DOTALL)


@pytest.mark.smollm2
def test_the_code_for_openais_client_runs_as_written(redis_url: str) -> None:
    _, code = blocks("python")
    command = [sys.executable, "-m", "tokenfleet.producer.gateway", "--port", "0"]
    gateway = subprocess.Popen(
        [*command, "--redis-url", redis_url, "--models", "smollm2"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert gateway.stderr is not None
    try:
        port = json.loads(gateway.stderr.readline())["port"]
        assert code.count(":8000/") == 1, "only the address is replaced"
        done = subprocess.run(
            [sys.executable, "-c", code.replace(":8000/", f":{port}/")],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        gateway.terminate()
        gateway.communicate()
    assert done.returncode == 0, done.stderr
    assert "sky blue" in done.stdout, "the simulated engine repeats the prompt"
    assert gateway.returncode == 0


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_is_understood(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parsed to the end, with the command itself left out; what a shell is taught is taught to one
    with a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    words = shlex.split(line)[1:]
    for flag in ("--json", "--config"):
        if flag in words:
            words[words.index(flag) + 1] = str(tmp_path / "file")
    app = build(words)
    for holder in (app, *(group.typer_instance for group in app.registered_groups)):
        for command in holder.registered_commands:
            original = command.callback
            command.callback = _parsed_only(original)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 or "Usage:" in done.output, done.output
    assert "No such" not in done.output


def _parsed_only(command: object) -> object:
    import functools

    @functools.wraps(command)  # type: ignore[arg-type]  # keeps the signature that typer reads
    def parsed(**_: object) -> None:
        pass

    return parsed


def test_every_path_in_the_data_path_exists() -> None:
    named = re.findall(r"\b((?:producer|worker|engine|kernels|tests|ops)/[\w./-]*)", README)
    assert len(named) > 12
    missing = [path for path in named if not (ROOT / path.rstrip(".")).exists()]
    assert missing == []


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([\w-]+)`", README)) | {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_every_setting_and_flag_that_is_named_exists() -> None:
    from tokenfleet.worker.settings import WorkerSettings

    telemetry = README.split("## Telemetry")[1].split("## ")[0]
    flags = re.findall(r"`--([\w-]+)", telemetry)
    assert len(flags) >= 4
    assert {flag.replace("-", "_") for flag in flags} <= set(WorkerSettings.model_fields)
