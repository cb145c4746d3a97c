"""The file from which a bench knows when its engine had work, and when it had first tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tokenfleet.engine.request import CoreEvent
from tokenfleet.worker.engine_link.step_log import StepLog


def noted(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_request_is_noted_once_with_its_first_tokens(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    log = StepLog(str(path))
    before = time.monotonic()
    log.begin()
    log.made([])
    log.begin()
    log.made([CoreEvent("a", 0, [1], None), CoreEvent("b", 0, [], None)])
    log.made([CoreEvent("a", 0, [2], None)])
    assert [line["ids"] for line in noted(path)] == [["a"]]
    log.made([CoreEvent("a", 0, [3], "length"), CoreEvent("b", 0, [1], None)])
    first, second = noted(path)
    assert second["ids"] == ["b"]
    assert before <= first["working_since"] <= first["made"] <= second["made"] <= time.monotonic()
    assert second["working_since"] == first["working_since"]


def test_work_begins_anew_after_a_pause(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    log = StepLog(str(path))
    for name in "ab":
        log.idle()
        log.begin()
        log.made([CoreEvent(name, 0, [1], "length")])
    first, second = noted(path)
    assert first["made"] <= second["working_since"]


def test_without_a_file_nothing_is_noted() -> None:
    log = StepLog(None)
    log.begin()
    log.made([CoreEvent("a", 0, [1], None)])
