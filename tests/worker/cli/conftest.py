"""The command line as people run it: real processes, a real server, a worker without a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Echo:
    """A running worker that answers every prompt with the prompt, over and over."""

    server: EmbeddedServer
    process: subprocess.Popen[str]

    @property
    def environment(self) -> dict[str, str]:
        """In which commands find the server and the model."""
        return clean_environment(TOKENFLEET_REDIS_URL=self.server.url, TOKENFLEET_MODEL_NAME=MODEL)

    def run(self, *arguments: str, stdin: str = "") -> Completed:
        return subprocess.run(
            command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # a lone surrogate in stdin is a byte that is no text
            timeout=60,
            env=self.environment,
            check=False,
        )

    def start(self, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        """Run a command and return while it runs."""
        return subprocess.Popen(
            command(*arguments), stdout=stdout, stderr=subprocess.PIPE, env=self.environment
        )


@pytest.fixture(scope="session")
def run() -> Run:
    """Run `tokenfleet` to its end."""

    def run_command(*arguments: str, stdin: str = "", **environment: str) -> Completed:
        return subprocess.run(
            command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment(**environment),
            check=False,
        )

    return run_command


@pytest.fixture(scope="session")
def echo(byte_tokenizer: Path) -> Iterator[Echo]:
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

        yield Echo(server, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0, "a worker that is asked to end exits with 0"
