"""The two files are the truth: of what a kill left of them, what is whole counts, nothing else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.batch import (
    BatchFiles,
    BatchSettings,
    FileRules,
    Kind,
    Problem,
    check_file,
)
from tokenfleet.producer.batch.output import BatchBusy, Output, is_busy
from tokenfleet.producer.batch.records import line_of, refusal_of, request_id
from tokenfleet.producer.batch.state import BatchError, BatchState

Requests = Callable[..., Path]
LINES = 6


@pytest.fixture
def begun(requests: Requests) -> tuple[BatchFiles, BatchState]:
    """A batch of six lines, of which no line is done."""
    files = BatchFiles.beside(requests(LINES))
    report = check_file(files.input)
    return files, BatchState.new(files, report, FileRules(), BatchSettings())


def refusal(state: BatchState, line: int) -> Any:
    return refusal_of(state.id, Problem(Kind.BODY, "code", "é" * line, line, custom_id=f"c{line}"))


def filled(files: BatchFiles, state: BatchState) -> bytes:
    output = Output(files, state).open()
    for line in range(1, LINES + 1):
        output.add(refusal(state, line))
    output.sync()
    output.close()
    return files.errors.read_bytes()


def test_cut_at_any_byte_only_whole_lines_count(begun: tuple[BatchFiles, BatchState]) -> None:
    files, state = begun
    whole = filled(files, state)
    for cut in range(len(whole) + 1):
        files.errors.write_bytes(whole[:cut])
        output = Output(files, state).open()
        count = whole[:cut].count(b"\n")
        assert [line for line in range(1, LINES + 1) if output.done[line]] == [*range(1, count + 1)]
        assert (output.tally.failed, output.tally.completed) == (count, 0)
        for line in range(count + 1, LINES + 1):
            output.add(refusal(state, line))
        output.close()
        assert files.errors.read_bytes() == whole


def test_a_line_is_never_added_twice(begun: tuple[BatchFiles, BatchState]) -> None:
    files, state = begun
    filled(files, state)
    output = Output(files, state).open()
    with pytest.raises(AssertionError, match="line 3 is done"):
        output.add(refusal(state, 3))
    output.close()


def test_a_lock_goes_with_the_process_that_had_it(begun: tuple[BatchFiles, BatchState]) -> None:
    files, state = begun
    code = f"""
        import fcntl, sys
        file = open({str(files.output)!r}, "ab")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("locked", flush=True)
        sys.stdin.read()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    assert is_busy(files)
    with pytest.raises(BatchBusy):
        Output(files, state).open()
    holder.kill()
    holder.communicate()
    assert not is_busy(files)
    Output(files, state).open().close()


def test_a_file_that_cannot_be_opened_leaves_no_lock_behind(
    begun: tuple[BatchFiles, BatchState],
) -> None:
    files, state = begun
    files.errors.mkdir()
    with pytest.raises(IsADirectoryError):
        Output(files, state).open()
    files.errors.rmdir()
    Output(files, state).open().close()


@pytest.mark.parametrize("name", [None, 7, "", "batch_req_x_1", "batch_req_{}_", "batch_req_{}_x"])
def test_only_this_batchs_ids_name_a_line(name: Any) -> None:
    batch = "batch_0123"
    assert line_of(request_id(batch, 17), batch) == 17
    assert line_of(name.format("0123") if isinstance(name, str) else name, batch) is None


def test_a_state_file_survives_its_own_round_trip(begun: tuple[BatchFiles, BatchState]) -> None:
    files, state = begun
    state.write_first(files.state)
    assert BatchState.read(files.state) == state
    with pytest.raises(BatchError, match="another process"):
        state.write_first(files.state)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 2}', '{"version": 1}', "\0"])
def test_a_state_file_that_cannot_be_read_is_named(
    content: str, begun: tuple[BatchFiles, BatchState]
) -> None:
    files, _ = begun
    files.state.write_text(content)
    with pytest.raises(BatchError, match=r"requests\.output\.jsonl\.batch"):
        BatchState.read(files.state)
