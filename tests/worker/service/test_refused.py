"""A worker that can never serve says why, by name, and ends with the exit code for bad input."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import structlog

from tokenfleet.engine.errors import CheckpointError, ConfigError, UnsupportedModel


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError, UnsupportedModel])
async def test_a_model_that_the_engine_refuses_ends_the_worker(fleet, kind) -> None:
    class Refusing(fleet.engine_kind):
        async def start(self):
            raise kind("no such architecture: NoSuchForCausalLM")

    fleet.engine_kind = Refusing
    with structlog.testing.capture_logs() as lines:
        fleet.worker()
        assert await fleet.runs[0] == 2
    (refused,) = [line for line in lines if line["event"] == "model_refused"]
    assert "NoSuchForCausalLM" in refused["error"]


async def test_a_tokenizer_that_cannot_be_read_ends_the_worker(
    fleet, byte_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(byte_model, broken)
    (broken / "tokenizer.json").write_text("{")
    fleet._model = broken
    with structlog.testing.capture_logs() as lines:
        fleet.worker()
        assert await fleet.runs[0] == 2
    (refused,) = [line for line in lines if line["event"] == "model_refused"]
    assert "tokenizer" in refused["error"]
