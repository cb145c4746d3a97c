"""The bench of telemetry runs both workers in one run, and counts only what was done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenfleet.worker.bench.telemetry import TelemetryBench, bench_telemetry


def test_a_worker_with_a_black_hole_is_compared_with_one_without(
    make_byte_model: Callable[..., Path],
) -> None:
    said: list[str] = []
    config = TelemetryBench(
        make_byte_model(), jobs=4, tokens=4, step_ms=1.0, repeats=2, protocol="http", grace_s=100.0
    )
    found = json.loads(json.dumps(bench_telemetry(config, said.append)))
    alone, hole = found["ways"]["alone"], found["ways"]["black_hole"]
    for way in (alone, hole):
        assert 0 < way["lowest"] <= way["tokens_per_s"] <= way["highest"]
    ratio = hole["tokens_per_s"] / alone["tokens_per_s"]
    assert found["throughput_ratio"] == pytest.approx(ratio)
    assert found["exit_within_grace"]
    assert len(said) == 4
