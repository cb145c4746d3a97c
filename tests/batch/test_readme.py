"""The page about batches names every field, code and command that there is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.batch import IGNORED
from tokenfleet.producer.batch.bodies import NEUTRAL, ChatBody, CompletionBody
from tokenfleet.worker.commands.cli import EXAMPLES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "producer/batch/README.md").read_text()
CHECK = (ROOT / "producer/batch/check.py").read_text()


@pytest.mark.parametrize(
    "name",
    sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *IGNORED, *NEUTRAL, "best_of"}),
)
def test_every_field_that_is_accepted_is_named(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_every_code_is_named() -> None:
    codes = set(re.findall(r"\b[a-z]+_[a-z_]+\b", CHECK.split('"""')[1])) - {"custom_id"}
    assert len(codes) == 17
    assert {code for code in codes if f"`{code}`" not in PAGE} == set()


def test_every_command_is_shown() -> None:
    shown = set(re.findall(r"^tokenfleet (batch \w+)", PAGE, re.MULTILINE))
    assert shown == {name for name in EXAMPLES if name.startswith("batch ")}


def test_the_example_in_python_runs_as_written(
    valkey: Any, requests: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the server's address; every line of its file is refused, so no worker is needed."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert code.count("redis://localhost:6379/0") == 1
    monkeypatch.chdir(tmp_path)
    requests([{**line, "body": {"model": "m"}} for line in map(_line, "ab")])
    names: dict[str, Any] = {}
    exec(code.replace("redis://localhost:6379/0", valkey.url), names)
    report, summary = names["report"], names["summary"]
    assert report.codes == {"missing_required_parameter": 2}
    assert (summary.failed, summary.left) == (2, 0)


def _line(custom_id: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}}
