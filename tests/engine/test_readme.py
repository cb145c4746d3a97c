"""The code on the engine's page runs as it is written, but for the checkpoint's place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "engine" / "README.md").read_text()


def test_the_code_on_the_page_prints_every_sample(
    tiny_random: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert code.count("path/to/checkpoint") == 1, "only the place is replaced"
    shown: dict[str, object] = {}
    exec(code.replace("path/to/checkpoint", str(tiny_random("llama"))), shown)
    output: Any = shown["output"]  # what the page's loop left
    assert len(output.choices) == 4
    assert capsys.readouterr().out.strip()
