"""The gateway's bench asks both ways in one run, and says how they compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenfleet.worker.bench.gateway import GatewayBench, bench_gateway


def test_the_gateway_is_compared_with_the_direct_client_in_one_run(tiny_checkpoint: Path) -> None:
    said: list[str] = []
    config = GatewayBench(tiny_checkpoint, requests=2, streams=2, tokens=4, step_ms=1.0, repeats=2)
    found = json.loads(json.dumps(bench_gateway(config, said.append)))
    assert set(found["ways"]) == {"direct", "gateway"}
    for way in found["ways"].values():
        assert 0 < way["ttft_p50_ms"] <= way["ttft_p99_ms"]
        assert way["tokens_per_s"] > 0
    direct, gateway = found["ways"]["direct"], found["ways"]["gateway"]
    difference = gateway["ttft_p50_ms"] - direct["ttft_p50_ms"]
    assert found["added_ttft_p50_ms"] == pytest.approx(difference)
    assert found["ttft_p50_ratio"] == pytest.approx(gateway["ttft_p50_ms"] / direct["ttft_p50_ms"])
    assert len(said) == 4
