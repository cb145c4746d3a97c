"""The demo: it loses no token, would say so if it did, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tokenfleet.producer import Event, EventError
from tokenfleet.worker.demo.show import exit_code, worth_a_kill
from tokenfleet.worker.demo.view import LiveView, PlainView, closing
from tokenfleet.worker.demo.watched import Watched


def watched(*events: Event) -> Watched:
    job = Watched(1, "Why?", submitted_at=1.0, workers=["worker-1"])
    for second, event in enumerate(events, start=2):
        job.take(event, float(second))
    return job


def tokens(offset: int, *ids: int, text: str = "x", final: bool = False) -> Event:
    reason = "length" if final else None
    return Event(offset, token_ids=ids, text=text, finish_reason=reason, final=final, attempt=1)


def test_a_whole_stream_has_no_faults_and_its_figures() -> None:
    job = watched(tokens(0, 5), tokens(1, 6, 7), tokens(3, text="", final=True))
    assert job.faults == []
    assert (job.token_ids, job.text) == ([5, 6, 7], "xx")
    assert (job.ttft_s, job.tokens_per_s) == (1.0, 1.0)
    assert exit_code([job]) == 0
    assert "none missing" in closing([job], Path("t"), 1.0)


@pytest.mark.parametrize(
    ("made", "all_there", "killed"),
    [
        ((30, 30), True, True),
        ((160, 29), True, False),  # one of them would show nothing
        ((40, 30), False, False),  # there is time to wait for the others
        ((51, 51), False, True),  # and here there is none
        ((99, 50), False, False),
    ],
)
def test_a_worker_is_killed_in_the_middle_of_two_jobs(
    made: tuple[int, int], all_there: bool, killed: bool
) -> None:
    jobs = [watched(tokens(0, *range(count))) for count in made]
    assert worth_a_kill(jobs, [("Why?", 100)], all_there=all_there) is killed


def test_tokens_that_all_came_at_once_have_no_rate() -> None:
    job = watched()
    job.take(tokens(0, 5, 6), 3.0)
    job.take(tokens(2, text="", final=True), 3.0)
    assert job.tokens_per_s is None


def test_the_verdict_speaks_of_a_killed_worker_only_where_a_job_went_on() -> None:
    job = watched(tokens(0, 5), tokens(1, 6, final=True))
    assert "killed" not in closing([job], Path("t"), 1.0)
    job.resumed_at = 1
    assert "1 job went on where the killed worker" in closing([job], Path("t"), 1.0)


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([tokens(0, 5), tokens(2, 6), tokens(3, final=True)], "gap at offset 2"),
        ([tokens(0, 5, 6), tokens(1, 6), tokens(3, final=True)], "duplicate at offset 1"),
        (
            [Event(0, finish_reason="error", error=EventError("oom", "no memory"), final=True)],
            "no memory",
        ),
        ([Event(0, finish_reason="cancelled", final=True)], "cancelled"),
    ],
)
def test_a_broken_stream_fails_the_demo_by_name(events: list[Event], fault: str) -> None:
    job = watched(*events)
    assert fault in job.faults[0]
    assert exit_code([watched(tokens(0, 1), tokens(1, final=True)), job]) == 1
    assert fault in closing([job], Path("t"), 1.0)


def test_a_job_that_never_ended_fails_the_demo() -> None:
    assert exit_code([watched(tokens(0, 5))]) == 1


def test_the_plain_view_prints_all_of_the_text_in_order() -> None:
    text = "".join(f"word{number} " for number in range(60)) + "\n\nend"
    output = io.StringIO()
    view = PlainView(Console(file=output, width=200))
    job = Watched(3, "p", workers=["worker-1"])
    for start in range(0, len(text), 7):
        view.event(job, tokens(start, 1, text=text[start : start + 7]))
    view.event(job, tokens(99, text="", final=True))
    lines = [line.split("| ", 1)[1] for line in output.getvalue().splitlines() if "| " in line]
    assert " ".join(lines).replace(" / ", " ").split() == text.split()


def test_the_live_view_draws_every_job() -> None:
    output = io.StringIO()
    view = LiveView(Console(file=output, width=100, force_terminal=True))
    job = watched(tokens(0, 5, text="Because of"), tokens(1, text=" [red]", final=True))
    with view.shown([job, Watched(2, "Later?")], lambda: 3.0):
        view.killed("worker-1", 17, [job])
        view.say("hello", 3.0)
    assert "Because of [red]" in output.getvalue(), "a job's text is not markup"
    assert "SIGKILL worker-1" in output.getvalue()


@contextmanager
def running_demo(trace_dir: Path, step_ms: int = 15) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tokenfleet.worker.commands.cli", "demo", "-o", "json"]
    process = subprocess.Popen(
        [*command, "--trace-dir", str(trace_dir), "--simulated-step-ms", str(step_ms)],
        env={**os.environ, "TOKENFLEET_NAMESPACE": "a-setting-of-the-person-who-runs-it"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def left_behind(said: str) -> list[str]:
    """Which of the processes that a demo spoke of are still there."""
    workers = [part.split(")")[0] for part in said.split("started (pid ")[1:]]
    port = int(said.split("redis://127.0.0.1:")[1].split("/")[0])
    found = [f"worker {pid}" for pid in workers if Path(f"/proc/{pid}").exists()]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended
        if "tokenfleet.worker.engine_link.engine_child" in words and words[-2] in workers:
            found.append(" ".join(words))
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            found.append(f"a server on port {port}")
    return found


@pytest.mark.smollm2
def test_the_demo_kills_a_worker_loses_nothing_and_ends_by_itself(tmp_path: Path) -> None:
    with running_demo(tmp_path) as demo:
        out, said = demo.communicate(timeout=240)
    assert demo.returncode == 0, said
    assert "*** SIGKILL" in said
    assert "goes on at offset" in said
    outcome: dict[str, Any] = json.loads(out)
    assert all(not job["faults"] for job in outcome["jobs"])
    moved = [job for job in outcome["jobs"] if job["resumed_at"]]
    assert moved
    for job in moved:
        assert len(set(job["workers"])) == len(job["workers"])
        assert job["attempts"] > 1  # and more where a busy machine let a lease run out
    # who runs a job is asked after its token came: where that takes long, nobody may by then
    assert any(len(job["workers"]) == 2 for job in moved)
    spans = [json.loads(line) for line in Path(outcome["trace_file"]).read_text().splitlines()]
    (killed,) = re.findall(r"SIGKILL (worker-\d)", said)
    survived = [job for job in outcome["jobs"] if set(job["workers"]) - {killed}]
    assert survived
    for job in outcome["jobs"]:
        names = {span["name"] for span in spans if span["trace_id"] == job["trace_id"]}
        assert "send smollm2:interactive" in names
        if job in survived:  # what the killed one ended shortly before, it may not have told
            assert {"process smollm2:interactive", "chat smollm2"} <= names
    resumed = [e for span in spans for e in span.get("events", []) if e["name"] == "resumed"]
    assert {e["attributes"]["tokenfleet.job.offset"] for e in resumed} >= {
        job["resumed_at"] for job in moved
    }
    assert left_behind(said) == []


@pytest.mark.smollm2
def test_a_worker_that_cannot_start_fails_the_demo_with_its_last_words(tmp_path: Path) -> None:
    with running_demo(tmp_path, step_ms=-1) as demo:
        _, said = demo.communicate(timeout=240)
    assert demo.returncode == 1
    assert "FAILED: worker-" in said
    assert "simulated_step_ms" in said
    assert "Traceback" not in said
    assert left_behind(said) == []


@pytest.mark.smollm2
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running_demo(tmp_path) as demo:
        assert demo.stderr is not None
        said = ""
        for line in demo.stderr:
            said += line
            if "worker-1 is ready" in line:
                break
        os.kill(demo.pid, number)
        _, rest = demo.communicate(timeout=240)
    assert demo.returncode == 130
    assert "Traceback" not in rest
    assert left_behind(said) == []
