"""`tokenfleet worker`: its flags are the settings, and its exit codes say what was wrong."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.embedded import hold_port
from tokenfleet.worker.commands.worker import HIDDEN, setting_texts
from tokenfleet.worker.settings import WorkerSettings

HEAVY = ("torch", "transformers", "redis", "pydantic", "opentelemetry", "grpc", "structlog")
SIMULATED = ("--simulated-step-ms", "1")
"""No model is looked for."""


def test_every_setting_is_a_flag_with_its_default(run: Any) -> None:
    done = run("worker", "--help")
    assert done.returncode == 0
    for name, field in WorkerSettings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        assert (flag in done.stdout) == (name not in HIDDEN), flag
        if isinstance(field.default, int | float | str) and not isinstance(field.default, bool):
            assert str(field.default) in done.stdout, name


def test_the_text_of_a_flag_is_the_text_of_its_setting() -> None:
    assert setting_texts(WorkerSettings)["lease_s"].startswith("How long a job stays")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("--lease-s", "-1", "--model", "x"), "lease_s"),
        (("--block-size", "24", "--model", "x"), "block_size"),
        (("--dtype", "float8", "--model", "x"), "dtype"),
        (("--redis-url", "localhost", "--model", "x"), "redis_url"),
        (("--otlp-endpoint", "collector:4317", "--model", ".", *SIMULATED), "otlp_endpoint"),
        (("--trace-file", "/dev/null/spans.jsonl", "--model", ".", *SIMULATED), "/dev/null"),
        (("--log-format", "xml", "--model", "."), "log-format"),
        (("--model", "owner/name"), "directory"),
        (("--model", str(Path(__file__).parent)), "config.json"),
        (("--embedded", "--redis-url", "redis://example.org/0", "--model", "."), "this machine"),
        (("--embedded", "--redis-url", "redis://localhost:99999/0", "--model", "."), "port"),
        ((), "--model"),
    ],
)
def test_a_bad_setting_stops_the_start_by_name(run: Any, flags: tuple[str, ...], name: str) -> None:
    done = run("worker", *flags)
    assert done.returncode == 2
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_a_config_file_is_read_and_its_mistakes_are_named(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "fleet.toml"
    config.write_text('model = "x"\nmax_num_sequences = 3\n')
    done = run("worker", "--config", str(config))
    assert done.returncode == 2
    assert "max_num_seqs" in done.stderr, "the nearest name that is a setting"


def test_a_variable_that_is_no_setting_is_a_warning_with_the_nearest_name(run: Any) -> None:
    done = run("worker", "--lease-s", "0", TOKENFLEET_MODELL="y", TOKENFLEET_SERVICE_PORT="1")
    assert done.returncode == 2
    assert "TOKENFLEET_MODELL (did you mean TOKENFLEET_MODEL?)" in done.stderr
    assert "TOKENFLEET_SERVICE_PORT" in done.stderr


def test_a_taken_port_is_no_place_for_an_embedded_server(run: Any, byte_tokenizer: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"redis://localhost:{taken.getsockname()[1]}/0"
        done = run("worker", "--embedded", "--model", str(byte_tokenizer), "--redis-url", url)
    assert done.returncode == 2
    assert "in use" in done.stderr
    assert "--redis-url" in done.stderr


def test_an_embedded_worker_serves_and_takes_its_server_with_it(
    run: Any, byte_tokenizer: Path, request: pytest.FixtureRequest
) -> None:
    url = f"redis://127.0.0.1:{hold_port(request.node)}/0"
    flags = ("--embedded", "--redis-url", url, "--model", str(byte_tokenizer), "--model-name", "m")
    hooks = ("--simulated-step-ms", "1", "--log-format", "json")
    process = subprocess.Popen(
        [sys.executable, "-m", "tokenfleet.worker.commands.cli", "worker", *flags, *hooks],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = process.stderr.readline()
    assert f"embedded server at {url}" in said
    done = run(
        "submit", "--wait", "--raw", "ab", "--max-tokens", "4", "--model", "m", "--redis-url", url
    )
    assert (done.returncode, done.stdout) == (0, "abab\n")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 0
    assert run("queue", "list", "--redis-url", url).returncode == 3, "nobody listens any more"


def test_loading_the_command_line_loads_nothing_heavy() -> None:
    script = (
        "import sys; import tokenfleet.worker.commands.cli as cli; cli.build(['submit'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
