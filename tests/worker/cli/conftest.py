"""The command line as people run it: real processes, a real server, a worker without a model."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tokenfleet.producer.embedded import EmbeddedServer

MODEL = "echo"
Completed = subprocess.CompletedProcess[str]
Run = Callable[..., Completed]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tokenfleet.worker.commands.cli", *arguments]


def clean_environment(**changes: str) -> dict[str, str]:
    """Ours without settings that a developer may have exported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")}
    return {**kept, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **changes}


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without a model: every byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("bytes")
    vocab = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "</s>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    )
    return path


class Commands:
    """Runs commands to their end, each in a fork of a process that has imported all there is.

    An answer names its command: one that comes when its test has ended is no other test's.
    """

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(240)
        self._numbers = itertools.count()
        script = Path(__file__).with_name("forked.py")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(script)], stdin=theirs, env=clean_environment()
            )

    def run(self, arguments: Sequence[str], environment: dict[str, str], stdin: str) -> Completed:
        number = next(self._numbers)
        asked = {"number": number, "arguments": arguments, "environment": environment}
        with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
            given.write(stdin.encode(errors="surrogateescape"))  # a lone surrogate is no text
            given.seek(0)
            streams = [file.fileno() for file in (given, out, err)]
            socket.send_fds(self._line, [json.dumps(asked).encode()], streams)
            answered = -1
            while answered != number:
                answered, code = map(int, self._line.recv(64).split())
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode(errors="surrogateescape"))
        return Completed(arguments, code, *said)

    def close(self) -> None:
        self._line.close()
        assert self._process.wait(timeout=240) == 0


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    made = Commands()
    yield made
    made.close()


@dataclass(frozen=True)
class Echo:
    """A running worker that answers every prompt with the prompt, over and over."""

    server: EmbeddedServer
    process: subprocess.Popen[str]
    commands: Commands

    @property
    def environment(self) -> dict[str, str]:
        """In which commands find the server and the model."""
        return clean_environment(TOKENFLEET_REDIS_URL=self.server.url, TOKENFLEET_MODEL_NAME=MODEL)

    def run(self, *arguments: str, stdin: str = "") -> Completed:
        return self.commands.run(arguments, self.environment, stdin)

    def start(self, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Run a command and return while it runs."""
        return subprocess.Popen(
            command(*arguments), stdout=stdout, stderr=subprocess.PIPE, env=self.environment
        )


@pytest.fixture(scope="session")
def run(commands: Commands) -> Run:
    """Run `tokenfleet` to its end."""

    def run_command(*arguments: str, stdin: str = "", **environment: str) -> Completed:
        return commands.run(arguments, clean_environment(**environment), stdin)

    return run_command


@pytest.fixture(scope="session")
def echo(byte_tokenizer: Path, commands: Commands) -> Iterator[Echo]:
    with EmbeddedServer() as server:
        flags = {
            "--redis-url": server.url,
            "--model": str(byte_tokenizer),
            "--model-name": MODEL,
            "--simulated-step-ms": "5",
            "--max-model-len": "2000",
            "--log-format": "json",
        }
        process = subprocess.Popen(
            command("worker", *(part for flag in flags.items() for part in flag)),
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        assert process.stderr is not None
        for line in process.stderr:
            if '"worker_ready"' in line:
                break
        else:
            raise AssertionError(f"the worker ended with {process.wait()}")

        yield Echo(server, process, commands)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)
        assert process.returncode == 0, "a worker that is asked to end exits with 0"
