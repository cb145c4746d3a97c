"""The scaling bench runs the whole set, and says what it was and what it cost."""

from __future__ import annotations

import os
from pathlib import Path

from tokenfleet.worker.bench import scaling


async def test_a_number_of_workers_runs_the_whole_set(tiny_checkpoint: Path) -> None:
    workload = scaling.Workload(jobs=4, tokens=5, slots=2, step_ms=1.0)
    (row,) = await scaling.bench_scaling([1], workload, tiny_checkpoint)
    assert row["share"] == 1.0
    assert sum(row["steps"]) >= 4 * 5 / 2
    assert (row["jobs"], row["tokens"], row["slots"], row["step_ms"]) == (4, 5, 2, 1.0)


def test_processes_are_counted_by_their_group() -> None:
    spent = [seconds for group, seconds in scaling._processes() if group == os.getpgrp()]
    assert max(spent) > 0
