"""The queue's bench counts what was done, and sets it beside XADD of the same run."""

from __future__ import annotations

import shutil

import pytest

from tokenfleet.worker.bench import queue
from tokenfleet.worker.bench.runs import BenchFailed
from tokenfleet.worker.claims import EmitOutcome


def test_the_queue_is_measured_beside_xadd() -> None:
    said: list[str] = []
    found = queue.bench_queue(queue.QueueBench(jobs=300, flushes=2, repeats=2), said.append)
    results = found["results"]
    for name in ("jobs_per_s", "client_us_per_job", "packing_ms_per_flush", "client_ms_per_flush"):
        assert 0 < results[name]["low"] <= results[name]["median"] <= results[name]["high"]
    parts = [results[f"{part}_ms_per_flush"] for part in ("packing", "sending")]
    assert sum(part["low"] for part in parts) <= results["client_ms_per_flush"]["median"] * 1.001
    assert ("jobs/xadd" in found["ratios"]) is bool(shutil.which("redis-benchmark"))
    assert len(said) == 2


def test_work_that_was_not_done_makes_no_figure(monkeypatch) -> None:
    """A queue that loses emits must not look fast."""

    async def lossy(self, emissions):
        return EmitOutcome(frozenset(), frozenset(), frozenset())

    monkeypatch.setattr(queue.TimedQueue, "emit", lossy)
    with pytest.raises(BenchFailed, match="the log holds 0 of"):
        queue.bench_queue(queue.QueueBench(jobs=256, flushes=1, repeats=1), lambda _: None)
