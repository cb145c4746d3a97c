"""A gateway's life: how it starts, what it is while Redis is away, how it ends."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tokenfleet.producer import Client
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.gateway import server
from tokenfleet.producer.gateway.command import run
from tokenfleet.producer.gateway.settings import GatewaySettings

PAUSE_S = 0.02
"""Between two questions to somebody who has no event to wait for."""


@pytest.fixture
def own_worker(byte_tokenizer: Path, tmp_path: Path, tools: Any) -> Iterator[Callable[..., Any]]:
    """own_worker(url, ...) starts a worker on a server of the test's own."""
    made: list[Any] = []

    def start(url: str, **settings: Any) -> Any:
        log = tmp_path / f"worker{len(made)}.log"
        worker = tools.Process(tools.worker_command(url, byte_tokenizer, **settings), log)
        worker.start()
        worker.said("worker_ready")
        made.append(worker)
        return worker

    yield start
    for worker in made:
        worker.stop()


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """A gateway sets up its process's logging; in ours the next test would log to its closed
    output."""
    loggers = [logging.getLogger(), logging.getLogger("tokenfleet.producer.gateway")]
    before = [(list(one.handlers), one.level) for one in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, before):
        logger.handlers[:] = handlers
        logger.setLevel(level)


def ask(url: str, count: int) -> dict[str, Any]:
    return {
        "url": f"{url}/v1/completions",
        "json": {"model": "m", "prompt": "ab", "max_tokens": count, "stream": True},
    }


def test_running_streams_finish_after_sigterm_and_the_exit_code_is_0(
    worker: Any, make_gateway: Callable[..., Any], tools: Any
) -> None:
    gateway = make_gateway("--grace-s", "60")
    with httpx.stream("POST", **ask(gateway.url, 300), timeout=240) as answer:
        lines = answer.iter_lines()
        text = next(lines)
        gateway.process.send_signal(signal.SIGTERM)
        text += "\n" + "\n".join(lines)
    events = [data for _, data in tools.sse_events(text)]
    assert events[-1] == "[DONE]"
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == tools.repeated("ab", 300)
    assert gateway.process.wait(timeout=240) == 0
    assert gateway.lines()[-1]["event"] == "gateway_stopped"


def test_it_says_that_it_is_about_to_end_and_takes_what_still_comes(
    worker: Any, make_gateway: Callable[..., Any]
) -> None:
    gateway = make_gateway("--drain-delay-s", "3600")
    with httpx.Client(base_url=gateway.url, timeout=240) as web:
        assert web.get("/readyz").status_code == 200
        gateway.process.send_signal(signal.SIGTERM)
        while (answer := web.get("/readyz")).status_code == 200:
            time.sleep(PAUSE_S)
        assert answer.text == "draining\n"
        body = {"model": "m", "prompt": "ab", "max_tokens": 3}
        assert web.post("/v1/completions", json=body).status_code == 200
    assert gateway.stop() == 0, "a second signal waits no longer"


def test_what_runs_beyond_the_grace_is_cut_and_its_job_cancelled(
    worker: Any, make_gateway: Callable[..., Any], gateway_server: EmbeddedServer, tools: Any
) -> None:
    gateway = make_gateway("--grace-s", "0")
    with httpx.stream("POST", **ask(gateway.url, 8000), timeout=240) as answer:
        job_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        next(lines)
        gateway.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            deque(lines, maxlen=0)
    assert gateway.process.wait(timeout=240) == 0
    (line,) = [line for line in gateway.lines() if line.get("job_id") == job_id]
    assert line["completion_tokens"] < 8000
    with Client(gateway_server.url, namespace=tools.NAMESPACE) as client:
        while not (status := client.job(job_id).status()).state.terminal:
            time.sleep(PAUSE_S)
    assert status.state == "cancelled"


def test_it_starts_without_redis_and_is_ready_once_it_is_there(
    make_gateway: Callable[..., Any], own_worker: Callable[..., Any], tmp_path: Path
) -> None:
    server = EmbeddedServer(data_dir=tmp_path / "data")
    gateway = make_gateway(url=server.url)
    with httpx.Client(base_url=gateway.url, timeout=240) as web:
        assert web.get("/healthz").text == "ok\n"
        answer = web.get("/readyz")
        assert answer.status_code == 503
        assert "Redis" in answer.text
        asked = {"model": "m", "prompt": "ab"}
        answer = web.post("/v1/completions", json=asked)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "broker_unavailable"
        assert str(server.port) not in answer.text, "where our servers are is nobody's business"
        while "was not reached" not in web.get("/status").text:
            time.sleep(PAUSE_S)
        with server:
            while web.get("/readyz").status_code != 200:
                time.sleep(PAUSE_S)
            own_worker(server.url)
            body = {"model": "m", "prompt": "ab", "max_tokens": 3}
            assert web.post("/v1/completions", json=body).json()["choices"][0]["text"] == "aba"
    assert gateway.stop() == 0


def test_a_batch_goes_on_where_a_killed_gateway_left_it(
    worker: Any, make_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    flags = ("--files-dir", str(tmp_path))
    first = make_gateway(*flags)
    count = 150
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"<{n}>", "max_tokens": 20},
        }
        for n in range(count)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while client.batches.retrieve(batch.id).request_counts.completed < count // 4:
            time.sleep(PAUSE_S)
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    second = make_gateway(*flags)
    with OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0) as client:
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing")
            time.sleep(PAUSE_S)
        records = [
            json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()
        ]
    assert sorted(int(record["custom_id"]) for record in records) == list(range(count))
    assert second.stop() == 0


def test_idle_connections_are_kept_longer_than_a_proxy_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a proxy sends as we close comes back to its client as 502."""
    served: list[Any] = []

    class Server:
        def __init__(self, config: Any, *_: Any) -> None:
            served.append(config)

        def run(self, sockets: Any) -> None:
            assert sockets

    monkeypatch.setattr(server, "_Server", Server)
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    server.serve(GatewaySettings(port=0))
    assert served[0].timeout_keep_alive > 60


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--host", "0.0.0.0"), "--keys-file"),
        (("--keys-file", "/nonexistent"), "/nonexistent cannot be read"),
        (("--max-body-bytes", "0"), "max_body_bytes"),
        (("--config", "/nonexistent"), "/nonexistent cannot be read"),
        (("--files-dir", "/dev/null/files"), "files_dir /dev/null/files cannot be written"),
        (("--new-key", "a b"), "tenant"),
        (("--host", "203.0.113.1", "--anonymous-tenant", "a"), "cannot listen on 203.0.113.1"),
    ],
)
@pytest.mark.usefixtures("logging_as_it_was")
def test_settings_that_cannot_be_served_are_named_and_the_exit_code_is_2(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(flags) == 2
    assert says in capsys.readouterr().err


def without(modules: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `tokenfleet ...` where these modules are not installed."""
    code = (
        "import sys\n"
        f"for name in {modules.split()!r}: sys.modules[name] = None\n"
        "from tokenfleet.worker.entry import main\n"
        f"sys.argv = ['tokenfleet', *{arguments!r}]\n"
        "main()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240
    )


def test_the_command_runs_without_what_only_a_worker_needs() -> None:
    """As after `pip install tokenfleet[gateway]`."""
    workers = "typer rich structlog torch transformers tokenizers numpy safetensors llguidance"
    done = without(workers, "gateway", "--new-key", "alice")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tf-")


def test_a_missing_library_is_named_with_the_extra_that_brings_it() -> None:
    done = without("uvicorn", "gateway")
    assert done.returncode == 2
    assert "pip install 'tokenfleet[gateway]'" in done.stderr
