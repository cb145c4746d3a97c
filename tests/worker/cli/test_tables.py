"""What a list looks like: whole values in any width, and text that is only text."""

from __future__ import annotations

import json

import pytest

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Output

JOB_ID = "01a22bdb-997b-7d21-ac03-46d2cfe43b7e.0"
ROW = {"job_id": JOB_ID, "error": "the prompt [/INST] was [bold]wrong", "new": None}


def shown(capsys: pytest.CaptureFixture[str], output: Output = Output.TEXT) -> str:
    base.print_rows(("job_id", "error", "new"), [ROW], output, empty="none")
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_a_job_id_can_be_copied_from_a_terminal_of_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    said = shown(capsys)
    assert JOB_ID in said
    assert "…" not in said
    assert "[bold]wrong" in said


def test_a_pipe_gets_one_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (line for line in shown(capsys).splitlines() if JOB_ID in line)
    assert ROW["error"] in line


def test_a_program_gets_the_row_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(shown(capsys, Output.JSON)) == [ROW]


def test_what_msgpack_has_and_json_has_not_is_still_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job's metadata may hold it."""
    odd = {b"k": b"\xff", 2: float("nan"), True: [float("-inf"), (1, {None: 0.5})]}

    def refuse(name: str) -> None:
        raise AssertionError(name)

    base.print_json(odd)
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"k": "\ufffd", "2": None, "true": [None, [1, {"null": 0.5}]]}
