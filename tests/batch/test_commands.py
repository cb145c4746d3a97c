"""`tokenfleet batch ...` as people run it: what is printed where, and with which exit code."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenfleet.producer.batch import BatchFiles, Phase, Progress
from tokenfleet.producer.protocol import EventError
from tokenfleet.worker.commands import batch_base, batch_view
from tokenfleet.worker.commands.cli import build

Requests = Callable[..., Path]


@dataclass(frozen=True)
class Said:
    """What a command came to."""

    code: int | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Commands:
    """Runs `tokenfleet batch` against one namespace."""

    def __init__(self, lab: Any) -> None:
        self._where = ("--redis-url", lab.server.url, "--namespace", lab.namespace)

    async def run(self, name: str, *arguments: object) -> Said:
        """In this process, in a thread: starting Python takes longer than most of what is run."""
        words = ["batch", name, *map(str, arguments), *self._place(name)]
        done = await asyncio.to_thread(CliRunner().invoke, build(words), words)
        return Said(done.exit_code, done.stdout, done.stderr)

    async def start(self, name: str, *arguments: object, **options: Any) -> Any:
        """As a process of its own."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")}
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tokenfleet.worker.commands.cli", "batch", name),
            *(*map(str, arguments), *self._place(name)),
            stdout=asyncio.subprocess.PIPE,
            stderr=options.pop("stderr", asyncio.subprocess.PIPE),
            **options,
            env={**environment, "COLUMNS": "200"},
        )

    def _place(self, name: str) -> tuple[str, ...]:
        return () if name in ("validate", "status") else self._where


@pytest.fixture
def batch(valkey_lab: Any) -> Commands:
    return Commands(valkey_lab)


async def test_validate_says_line_and_code_and_submits_nothing(
    batch: Commands, requests: Requests, tools: Any
) -> None:
    path = requests([tools.request_line("a"), b"x", tools.request_line("b", n=0)])
    text = await batch.run("validate", path)
    as_json = await batch.run("validate", path, "-o", "json")
    assert text.code == as_json.code == 2
    first, second, total = text.out.splitlines()
    assert first.startswith("line 2: invalid_json_line: ")
    assert second.startswith("line 3 [b]: invalid_value: n: ")
    assert total.startswith("3 line(s), 1 valid, 2 problem(s)")
    *problems, summary = map(json.loads, as_json.out.splitlines())
    assert [(p["line"], p["code"], p["param"]) for p in problems] == [
        (2, "invalid_json_line", None), (3, "invalid_value", "n"),
    ]  # fmt: skip
    assert summary["codes"] == {"invalid_json_line": 1, "invalid_value": 1}
    good = await batch.run("validate", requests(2, name="good.jsonl"))
    assert (good.code, good.err) == (0, "")


async def test_a_faulty_file_is_exit_code_2_and_a_file_that_is_not_there_too(
    batch: Commands, requests: Requests, tmp_path: Path
) -> None:
    path = requests([b"x"] * 30)
    faulty = await batch.run("run", path)
    missing = await batch.run("run", tmp_path / "nothing.jsonl")
    assert (faulty.code, faulty.out) == (2, "")
    assert faulty.err.count("invalid_json_line") == 21
    assert "and 10 more" in faulty.err
    assert "a prompt is a JSON text in quotes" in faulty.err
    assert (missing.code, missing.out) == (2, "")
    assert "nothing.jsonl cannot be read" in missing.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("run", "."), "is a directory"),
        (("status", "/"), "is a directory"),
        (("run", "REQUESTS", "--output-file", "/proc/none/x.jsonl"), "written into /proc/none"),
    ],
)
async def test_a_path_that_cannot_be_used_is_exit_code_2(
    batch: Commands, requests: Requests, words: tuple[str, ...], problem: str
) -> None:
    path = requests(1)
    said = await batch.run(*(str(path) if word == "REQUESTS" else word for word in words))
    assert (said.code, said.out) == (2, "")
    assert problem in said.err


async def test_prompts_without_a_model_are_refused_with_the_option_that_gives_one(
    batch: Commands, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')
    for verb in ("run", "validate"):
        said = await batch.run(verb, path)
        assert said.code == 2
        assert "run on the one that --model names" in said.err
    assert said.out.rstrip().endswith("no model")


async def test_a_file_of_which_some_lines_are_good_is_refused_with_the_option_that_runs_them(
    batch: Commands, requests: Requests, tools: Any
) -> None:
    said = await batch.run("run", requests([tools.request_line("a"), b"x"]))
    assert said.code == 2
    assert "--skip-invalid runs the 1 valid line(s)" in said.err


async def test_a_batch_begun_in_another_way_says_by_name_what_was_other(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any
) -> None:
    path = requests(1)
    async with working(valkey_lab):
        await batch.run("run", path)
    again = await batch.run("run", path, "--max-tokens", "7")
    assert again.code == 2
    assert "was started with max_tokens=None, not 7" in again.err


async def test_a_batch_whose_model_nobody_serves_says_so(
    batch: Commands, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_base, "LOOK_AFTER_S", 0.0)
    said = await batch.run("run", requests(1), "--timeout-s", "1")
    assert said.code == 4
    assert "no live worker serves" in said.err


async def test_a_reader_that_leaves_is_no_unreadable_file(batch: Commands, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("no json\n" * 20_000)
    process = await batch.start("validate", path)
    await process.stdout.readline()
    process.stdout._transport.close()
    said = (await process.stderr.read()).decode()
    assert (await process.wait(), said) == (0, "")


async def test_run_prints_a_summary_with_tokens_cost_and_the_slowest_lines(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any, tools: Any
) -> None:
    path = requests(20)
    async with working(valkey_lab):
        said = await batch.run("run", path)
    assert (said.code, said.err) == (0, "")
    assert "20 of 20 completed" in said.out
    for part in ("tokens/s", "worker-seconds on 1 worker(s)", "slowest    line ", "output "):
        assert part in said.out
    assert len(tools.read_json_lines(BatchFiles.beside(path).output)) == 20
    again = await batch.run("run", path, "-o", "json")
    assert (again.code, again.json["completed"], len(again.json["slowest"])) == (0, 20, 5)
    assert again.err == "it was completed before: nothing is run\n"


async def test_failed_lines_are_exit_code_1(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any
) -> None:
    path = requests(3)
    async with working(valkey_lab, lambda _: EventError("engine_died", "no")):
        said = await batch.run("run", path, "-o", "json", "--error-file", path.with_name("wrong"))
    assert (said.code, said.json["failed"], said.json["codes"]) == (1, 3, {"engine_died": 3})
    assert path.with_name("wrong").read_bytes().count(b"\n") == 3


async def test_a_time_that_is_up_is_exit_code_4_and_resume_goes_on(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any
) -> None:
    path = requests(3)
    files = BatchFiles.beside(path)
    said = await batch.run("run", path, "--timeout-s", "0.2", "-o", "json")
    assert said.code == 4
    assert f"tokenfleet batch resume {files.output}" in json.loads(said.err)["message"]
    async with working(valkey_lab):
        resumed = await batch.run("resume", files.output, "-o", "json")
    assert (resumed.code, resumed.json["completed"]) == (0, 3)


async def test_an_interrupt_leaves_a_batch_that_resume_takes_up(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any, until: Any
) -> None:
    path = requests(3)
    files = BatchFiles.beside(path)
    process = await batch.start("run", path, preexec_fn=hear_interrupts)
    await valkey_lab.until(lambda: has_entries(valkey_lab, 3))
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert b"go on with: tokenfleet batch resume" in err
    async with working(valkey_lab) as worker:
        assert (await batch.run("resume", path)).code == 0
    assert len(worker.seen) == 3
    assert files.output.read_bytes().count(b"\n") == 3


async def test_a_full_disk_ends_the_run_and_resume_goes_on_when_there_is_room(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any, tools: Any
) -> None:
    path = requests(300)
    files = BatchFiles.beside(path)

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    async with working(valkey_lab) as worker:
        process = await batch.start("run", path, preexec_fn=small_files)
        _, err = await process.communicate()
        assert process.returncode == 2
        assert b"File too large; not at its end; go on with" in err
        assert 0 < files.output.stat().st_size <= 60_000
        resumed = await batch.run("resume", path, "-o", "json")
    assert (resumed.code, resumed.json["completed"], len(worker.seen)) == (0, 300, 300)
    names = [line["custom_id"] for line in tools.read_json_lines(files.output)]
    assert len(names) == len(set(names)) == 300


def hear_interrupts() -> None:
    """Whoever runs the tests in the background has them, and all they start, ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def has_entries(lab: Any, count: int) -> bool:
    found: int = await lab.entries()
    return found == count


async def test_redis_out_of_reach_is_exit_code_3(requests: Requests) -> None:
    from types import SimpleNamespace

    nowhere = SimpleNamespace(server=SimpleNamespace(url="redis://127.0.0.1:1/0"), namespace="x")
    said = await Commands(nowhere).run("run", requests(1))
    assert (said.code, said.out) == (3, "")
    assert "127.0.0.1:1" in said.err


async def test_submit_status_cancel_results_and_watch_follow_one_batch(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any
) -> None:
    path = requests(['"one"', '"two"'], name="prompts.jsonl")
    files = BatchFiles.beside(path)
    submitted = await batch.run("submit", path, "--model", "m", "--max-tokens", "3", "-o", "json")
    assert (submitted.code, submitted.json["phase"]) == (0, "submitted")
    status = await batch.run("status", path)
    assert "0 of 2 completed, 0 failed, 2 left" in status.out
    cancelled = await batch.run("cancel", files.output, "-o", "json")
    assert (cancelled.code, cancelled.json["phase"]) == (0, "cancelled")
    watched = await batch.run("watch", path, "-o", "json")
    assert (watched.code, watched.json["left"]) == (1, 2)
    assert (await batch.run("resume", path, "--timeout-s", "0.2")).code == 4
    early = await batch.run("results", path, "-o", "json")
    assert (early.code, early.json["left"]) == (1, 2)
    async with working(valkey_lab) as worker:
        watched = await batch.run("watch", path, "-o", "json")
    assert (watched.code, watched.json["completed"], len(worker.seen)) == (0, 2, 2)
    assert "takes it up" in watched.err
    assert {job.sampling.max_tokens for job in worker.seen} == {3}
    results = await batch.run("results", path, "-o", "json")
    assert (results.code, results.json["phase"]) == (0, "completed")


async def test_watch_follows_the_process_that_is_at_it(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any
) -> None:
    path = requests(3)
    process = await batch.start("run", path)
    await valkey_lab.until(lambda: has_entries(valkey_lab, 3))
    busy = await batch.run("run", path)
    assert (busy.code, "another process runs this batch" in busy.err) == (2, True)
    watch = asyncio.create_task(batch.run("watch", path, "-o", "json"))
    async with working(valkey_lab):
        await process.communicate()
        watched = await watch
    assert process.returncode == watched.code == 0
    assert watched.json["completed"] == 3


async def test_a_batch_that_was_never_begun_is_exit_code_2(batch: Commands, tmp_path: Path) -> None:
    said = await batch.run("status", tmp_path / "requests.jsonl", "-o", "json")
    assert said.code == 2
    assert "requests.output.jsonl.batch" in json.loads(said.err)["message"]


async def test_on_a_terminal_there_is_a_bar(
    batch: Commands, valkey_lab: Any, requests: Requests, working: Any
) -> None:
    ours, theirs = os.openpty()
    async with working(valkey_lab):
        process = await batch.start("run", requests(40), stderr=theirs)
        os.close(theirs)
        shown = await asyncio.to_thread(_read_all, ours)
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert b"40 of 40 completed" in out
    for part in (b"40/40", b"0 failed", b"running", b"tokens/s", b"left"):
        assert part in shown


def _read_all(handle: int) -> bytes:
    """What comes from a terminal until its other end is closed."""
    found = b""
    try:
        while piece := os.read(handle, 4096):
            found += piece
    except OSError:  # how a terminal says that nobody is there any more
        pass
    finally:
        os.close(handle)
    return found


def progress(**changes: Any) -> Progress:
    values: dict[str, Any] = {
        "batch": "batch_1", "phase": Phase.RUNNING, "total": 100, "completed": 40, "failed": 2,
        "running": 8, "waiting": 50, "prompt_tokens": 1, "completion_tokens": 2,
        "tokens_per_s": 123.4, "lines_per_s": 1.0, "elapsed_s": 9.0, "left_s": 93.0, "note": None,
    }  # fmt: skip
    return Progress(**{**values, **changes})


def test_elsewhere_there_is_one_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(batch_view.time, "monotonic", lambda: now)
    view = batch_view.LineView()
    for _ in range(250):
        now += 0.1
        view.show(progress())
    said = capsys.readouterr()
    assert said.out == ""
    line = "42 of 100 done, 2 failed, 8 running, 123 tokens/s, 1m 33s left"
    assert said.err.splitlines() == [line, line]


def test_a_line_says_why_it_does_not_go_on() -> None:
    line = batch_view.line_of(progress(left_s=None, note="the queue is full"))
    assert line.endswith("time left unknown, the queue is full")
