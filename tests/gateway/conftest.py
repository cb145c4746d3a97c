"""A gateway as a process, before a worker whose engine repeats the prompt at a fixed pace.

A server of their own, one worker and one gateway serve the session: what the worker does at any
time would be seen by tests that look at a whole server. The simulated engine answers with the
prompt's own bytes, over and over: whatever a test gets back it can say in advance.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.gateway.api_keys import new_key

MODEL = "m"
NAMESPACE = "gateway"
STEP_MS = 3


def repeated(prompt: str, count: int) -> str:
    """What the simulated engine answers to a prompt: its tokens are bytes."""
    return (prompt * (count // len(prompt) + 1))[:count]


@dataclass(slots=True)
class Process:
    """A child with its log."""

    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**clean, "OMP_NUM_THREADS": "1", **self.environment},
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def lines(self) -> list[dict[str, Any]]:
        """Its log so far."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def said(self, event: str, **fields: Any) -> dict[str, Any]:
        """Wait for a log line; the time limit ends a wait in vain."""
        while True:
            for line in self.lines():
                if line.get("event") == event and fields.items() <= line.items():
                    return line
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            time.sleep(0.01)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=240)
        finally:
            self.process.kill()


@dataclass(slots=True)
class GatewayProcess(Process):
    """A gateway and how to reach it."""

    url: str = ""
    key: str = "none"

    def start(self) -> None:
        Process.start(self)
        line = self.said("gateway_listens")
        self.url = f"http://127.0.0.1:{line['port']}"

    def request_line(self, request_id: str) -> dict[str, Any]:
        """The log line of one request."""
        return self.said("request", request_id=request_id)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of bytes and a chat template that is the last message alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("bytes")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, "</s>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{{ messages[-1]['content'] }}"
    config = {"eos_token": "</s>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def worker_command(url: str, model: Path, **settings: Any) -> list[str]:
    given = {
        "redis_url": url,
        "namespace": NAMESPACE,
        "model": model,
        "model_name": MODEL,
        "max_num_seqs": 16,
        "flush_interval_ms": 0,
        "simulated_step_ms": STEP_MS,
        "grace_s": 0,
        "log_format": "json",
        **settings,
    }
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    flags = [flag.replace("_", "-") if flag.startswith("--") else flag for flag in flags]
    return [sys.executable, "-m", "tokenfleet.worker.commands.cli", "worker", *flags]


def gateway_command(url: str, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tokenfleet.producer.gateway"),
        *("--redis-url", url, "--namespace", NAMESPACE, "--port", "0", *flags),
    ]


@pytest.fixture(scope="session")
def gateway_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="session")
def worker(
    gateway_server: EmbeddedServer, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("worker") / "log"
    worker = Process(worker_command(gateway_server.url, byte_tokenizer), log)
    worker.start()
    worker.said("worker_ready")
    yield worker
    worker.stop()


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that the session's gateway knows."""

    path: Path
    alice: str
    bob: str
    """Of another tenant, for batch work only."""
    operator: str
    """May see the status page."""


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    made = {name: new_key(name) for name in ("alice", "bob", "operator")}
    more = {"bob": 'priority = "batch"\n', "operator": "status = true\n"}
    path.write_text("\n".join(entry + more.get(name, "") for name, (_, entry) in made.items()))
    return Keys(path, **{name: key for name, (key, _) in made.items()})


@pytest.fixture(scope="session")
def make_gateway(
    gateway_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., GatewayProcess]]:
    """make_gateway(*flags) starts a gateway; it ends with the session at the latest."""
    made: list[GatewayProcess] = []

    def make(*flags: str, url: str = gateway_server.url, **environment: str) -> GatewayProcess:
        log = tmp_path_factory.mktemp("gateway") / "log"
        gateway = GatewayProcess(gateway_command(url, *flags), log, environment)
        gateway.start()
        made.append(gateway)
        return gateway

    yield make
    for gateway in made:
        gateway.stop()


@pytest.fixture(scope="session")
def gateway(
    worker: Process,
    keys: Keys,
    make_gateway: Callable[..., GatewayProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> GatewayProcess:
    """The session's: keys, files, a page that may call, a small body limit."""
    gateway = make_gateway(
        *("--keys-file", str(keys.path)),
        *("--files-dir", str(tmp_path_factory.mktemp("files"))),
        *("--cors-origins", "https://chat.example"),
        *("--max-body-bytes", "65536", "--max-file-bytes", "1048576"),
    )
    gateway.key = keys.alice
    return gateway


@pytest.fixture
def openai_client(gateway: GatewayProcess) -> Iterator[OpenAI]:
    """The official client, as alice."""
    with OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        yield client


@pytest.fixture
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    """Plain HTTP, as alice."""
    headers = {"authorization": f"Bearer {gateway.key}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=240) as client:
        yield client


@pytest.fixture
async def web(gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP, as alice."""
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=240) as client:
        yield client


def sse_events(text: str) -> list[tuple[str | None, Any]]:
    """(id, data) of each event; `[DONE]` as it is."""
    events = []
    for block in re.split(r"\n\n", text):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if not line.startswith(":")
        )
        if "data" in fields:
            data = fields["data"]
            events.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events


@pytest.fixture(scope="session")
def tools() -> Any:
    """The helpers above, as attributes."""
    from types import SimpleNamespace

    return SimpleNamespace(
        repeated=repeated,
        sse_events=sse_events,
        worker_command=worker_command,
        Process=Process,
        MODEL=MODEL,
        NAMESPACE=NAMESPACE,
    )
