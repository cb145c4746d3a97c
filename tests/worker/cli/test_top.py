"""`tokenfleet top`: live on a terminal, one look into a pipe, lines of JSON for programs."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from typing import Any

import pytest

from tokenfleet.producer.fleet_view import FleetStatus, QueueDepth, WorkerLine
from tokenfleet.worker.commands.top import as_dict, drawn

COMMAND = (sys.executable, "-m", "tokenfleet.worker.commands.cli", "top")


@pytest.fixture
async def flags(valkey_lab: Any) -> list[str]:
    """The way to a fleet of one worker, with two jobs waiting and one running."""
    lab = valkey_lab
    queue = await lab.queue()
    await queue.heartbeat(
        {"slots": 8, "running": 1, "tokens_per_s": 41.5, "kv_usage": 0.25, "engine": "ready"},
        ttl_s=3600.0,
    )
    for _ in range(3):
        await lab.submit()
    await queue.claim(1)
    return ["--redis-url", lab.server.url, "--namespace", lab.namespace]


def text_of(status: FleetStatus, width: int = 200) -> str:
    from rich.console import Console

    console = Console(width=width, force_terminal=True)
    with console.capture() as captured:
        console.print(drawn(status))
    return captured.get()


def test_a_pipe_gets_one_look(flags: list[str]) -> None:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, check=True)
    words = [line.split() for line in done.stdout.splitlines()]
    assert ["42", "tok/s", "1/8", "slots", "2", "waiting", "0", "delayed", "0", "dead"] in words
    assert ["w1", "m", "ready", "1/8", "41.5", "25%"] in [row[:6] for row in words]
    waiting = [row for row in words if row[:2] == ["m", "default"]]
    assert [row[2:5] for row in waiting] == [["2", "0", "1"]]
    assert "\x1b" not in done.stdout


def test_json_is_one_line_a_look_until_the_reader_goes(flags: list[str]) -> None:
    asked = [*COMMAND, *flags, "-o", "json", "--interval-s", "0.1"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        assert process.wait(timeout=240) == 0
    for look in looks:
        assert look["workers"][0]["kv_usage"] == 0.25
        assert look["total"] == {"tokens_per_s": 41.5, "running": 1, "waiting": 2, "slots": 8}


def test_a_terminal_is_drawn_again_and_again_and_left_as_it_was(flags: list[str]) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *flags, "--interval-s", "0.1"],
        stdout=theirs,
        stdin=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(theirs)
    try:
        seen = read_until(ours, lambda text: text.count(b"w1") >= 3)
        process.send_signal(signal.SIGINT)
        seen += read_until(ours, lambda text: b"\x1b[?1049l" in text)
        assert process.wait(timeout=240) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert seen.startswith(b"\x1b[?1049h"), "on the other screen"


def read_until(fd: int, enough: Any) -> bytes:
    seen = b""
    while not enough(seen):
        if select.select([fd], [], [], 30)[0]:
            seen += os.read(fd, 65536)
    return seen


def test_what_is_wrong_stands_out_and_what_is_not_said_is_a_dash() -> None:
    worker = WorkerLine("w[red]1", "m", "h", "starting", 8, 0, 0, None, None, 14.0)
    queue = QueueDepth("m", "batch", waiting=1, paused=True)
    text = text_of(FleetStatus(0, (worker,), (queue,), delayed=0, dead=3))
    assert "w[red]1" in text, "a name is no markup"
    assert "starting" in text
    assert "14 s ago" in text
    assert "paused" in text
    assert " - " in text


@pytest.mark.parametrize("width", [30, 40, 60, 79, 80, 120])
def test_no_value_is_broken_in_a_terminal_of_any_width(width: int) -> None:
    names = ("gpu-box-one-12345-ab12cd", "gpu-box-two-12346-ff12cd")
    workers = tuple(
        WorkerLine(name, "smollm2", "h", "starting", 64, 12, 14, 512.3, 0.25, 1.0) for name in names
    )
    queues = (QueueDepth("smollm2", "interactive", waiting=1200, oldest_s=75.2, paused=True),)
    shown = text_of(FleetStatus(0, workers, queues, delayed=0, dead=0), width)
    values = ("smollm2", "starting", "12/64", "512.3", "25%", "1 s ago", "interactive", "1200")
    for value in (*names, *values, "1 min 15 s", "paused"):
        assert value in shown
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in shown.splitlines()]
    assert max(map(len, lines)) <= width


def test_a_queue_whose_jobs_nobody_takes_says_why() -> None:
    worker = WorkerLine("w1", "m", "h", "ready", 8, 0, 0, None, None, 1.0)
    queues = (QueueDepth("m", "batch", waiting=1), QueueDepth("other", "batch"))
    assert "no worker" not in text_of(FleetStatus(0, (worker,), queues, delayed=0, dead=0))
    waits = QueueDepth("other", "batch", waiting=1)
    assert "no worker" in text_of(FleetStatus(0, (worker,), (waits,), delayed=0, dead=0))


def test_an_empty_fleet_says_so() -> None:
    text = text_of(FleetStatus(0, (), (), 0, 0))
    assert "no workers" in text
    assert "no queues" in text


def test_a_look_is_plain_data() -> None:
    status = FleetStatus(7, (), (QueueDepth("m", "batch", 2),), 1, 0)
    assert json.loads(json.dumps(as_dict(status)))["queues"][0]["waiting"] == 2
