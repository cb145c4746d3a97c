"""The benches count right, compare in one run, and stop where the work was not done."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.worker.bench.cpu_time import PREFIX, CpuTimes, cpu_s
from tokenfleet.worker.bench.figures import (
    Seen,
    Summary,
    figures_of,
    interval,
    percentile,
    ratio,
    turn_by_turn,
)
from tokenfleet.worker.bench.first_token import (
    FEWEST_PAIRS,
    MOST_PAIRS,
    FirstTokens,
    Pair,
    Turn,
    in_pairs,
    in_words,
    short_w,
)
from tokenfleet.worker.bench.fleet import FleetContender, bench_fleet
from tokenfleet.worker.bench.runs import (
    UNSET,
    BenchConfig,
    BenchFailed,
    Child,
    Report,
    bench_engine,
    take_turns,
)
from tokenfleet.worker.bench.workloads import BenchJob, Workload, workload_s, workload_w
from tokenfleet.worker.demo.worker_process import WorkerProcess

pytestmark = pytest.mark.timeout(400)  # several processes that import torch, one after the other


def test_w_is_distinct_prompts_of_the_promised_shape() -> None:
    work = workload_w(8, 1000, seed=1)
    assert [(len(job.prompt), job.output) for job in work.jobs] == [(564, 128)] * 8
    assert len({job.prompt for job in work.jobs}) == 8
    assert workload_w(8, 1000, seed=1) == work
    assert workload_w(8, 1000, seed=2) != work


def test_s_is_sixteen_jobs_with_stragglers_in_the_same_order_every_time() -> None:
    work = workload_s(1000, seed=1)
    outputs = [job.output for job in work.jobs]
    assert sorted(outputs) == sorted([50, 120, 240, 1024] * 4)
    assert [job.output for job in workload_s(1000, seed=2).jobs] == outputs
    assert {len(job.prompt) for job in work.jobs} == {64}
    stragglers = [max(outputs[start : start + 4]) == 1024 for start in range(0, 16, 4)]
    assert sum(stragglers) >= 2, "a static batch has to wait for its longest job"


def test_figures_of_a_run_that_can_be_counted_by_hand() -> None:
    one, other = Seen(asked_at=10.0), Seen(asked_at=10.0)
    for moment in (11.0, 12.0, 14.0):
        one.tokens(moment, 1)
    other.tokens(15.0, 2)
    other.tokens(17.0, 4)
    other.tokens(18.0, 0)
    figures = figures_of([one, other])
    assert figures["output_tokens"] == 9
    assert figures["wall_s"] == 7.0
    assert figures["tokens_per_s"] == pytest.approx(9 / 7)
    assert (figures["ttft_p50_s"], figures["ttft_p99_s"]) == (1.0, 5.0)
    assert (figures["tpot_p50_s"], figures["tpot_p99_s"]) == (0.5, 1.5)
    assert figures["gap_p99_s"] == 2.0
    assert figures["completion_mean_s"] == 5.5


@pytest.mark.parametrize(
    ("share", "expected"), [(50, 5), (99, 10), (100, 10), (1, 1), (10, 1), (11, 2)]
)
def test_a_percentile_is_a_value_that_was_seen(share: float, expected: int) -> None:
    assert percentile([*range(10, 0, -1)], share) == expected


def test_several_runs_are_their_median_and_their_span() -> None:
    runs = tuple({"tokens_per_s": v} for v in (3.0, 1.0, 2.0))
    summary = Summary("engine", "W", runs)
    assert summary.middle("tokens_per_s") == 2.0
    assert summary.span("tokens_per_s") == (1.0, 3.0)
    other = Summary("other", "W", ({"tokens_per_s": 4.0},))
    assert ratio(summary, other) == 0.5
    assert not summary.has("steps")


def test_contenders_take_turns_and_unfinished_work_has_no_rate() -> None:
    played: list[str] = []

    class Contender:
        def __init__(self, name: str, missing: int = 0, from_turn: int = 1) -> None:
            self.name = name
            self._missing = missing
            self._turns_left = from_turn

        def run(self, workload: Workload) -> dict[str, float]:
            played.append(self.name)
            self._turns_left -= 1
            missing = 0 if self._turns_left > 0 else self._missing
            return {"tokens_per_s": 1.0, "output_tokens": workload.output_tokens - missing}

    config = BenchConfig(Path("m"), counts=(1,), repeats=2)
    both = [Contender("a"), Contender("b")]
    kept: list[Report] = []
    make = partial(Report, "engine", baselines=("a",), facts={})

    def play(them: list[Contender], config: BenchConfig = config) -> Report:
        return take_turns(config, 1000, lambda _: them, lambda _: None, kept.append, make)

    report = play(both)
    assert played == ["a", "b", "a", "b"]
    assert [(s.engine, len(s.runs)) for s in report.summaries] == [("a", 2), ("b", 2)]
    assert [report.complete, *(one.complete for one in kept)] == [True, False, False]
    with pytest.raises(BenchFailed, match="c made 127 of 128 tokens"):
        play([Contender("c", 1)])

    kept.clear()
    with pytest.raises(BenchFailed):
        play([Contender("a"), Contender("b", 1, from_turn=3)], replace(config, counts=(1, 2)))
    lengths = [[(s.engine, s.workload, len(s.runs)) for s in report.summaries] for report in kept]
    whole = [("a", "W N=1", 2), ("b", "W N=1", 2)]
    assert lengths == [[(*s[:2], 1) for s in whole], whole], "whole turns, and nothing of a third"


def test_the_engine_is_compared_with_transformers_in_one_run(tiny_checkpoint: Path) -> None:
    said: list[str] = []
    config = BenchConfig(
        tiny_checkpoint, counts=(2,), repeats=1, threads=1, compare=("transformers",)
    )
    report = bench_engine(config, said.append, lambda _: None)
    rows = {summary.engine: summary for summary in report.summaries}
    assert set(rows) == {"engine", "transformers single", "transformers batch all"}
    for row in rows.values():
        assert row.middle("output_tokens") == 256
        assert row.middle("tokens_per_s") > 0
        assert row.middle("peak_rss_bytes") > 2**20
    assert rows["engine"].span("blocks_spare_per_sequence_max")[1] <= 1.0
    assert rows["engine"].middle("mean_batch") > 1.0
    assert rows["transformers single"].middle("steps") == 256
    assert {found["to"] for found in report.ratios()} == set(rows) - {"engine"}
    written = json.loads(json.dumps(report.as_dict()))
    assert written["results"][0]["median"]["steps"] >= 128
    assert len(said) == 1 + 3


def test_the_fleet_is_compared_with_the_engine_alone_in_one_run(tiny_checkpoint: Path) -> None:
    config = BenchConfig(tiny_checkpoint, counts=(2,), repeats=1, threads=1, first_token_s=0.01)
    for _ in range(3):  # a busy machine may let the first job end before the second one comes
        report = bench_fleet(config, lambda _: None, lambda _: None)
        if all(summary.middle("mean_batch") > 1.0 for summary in report.summaries):
            break
    assert {summary.engine for summary in report.summaries} == {"fleet", "engine"}
    (row,) = [summary for summary in report.summaries if summary.engine == "fleet"]
    assert 0 < row.middle("ttft_outside_worker_s") < row.middle("ttft_mean_s")
    assert 0 < row.middle("ttft_until_claimed_s") < row.middle("ttft_outside_worker_s")
    (found,) = report.ratios()
    assert (found["of"], found["to"]) == ("fleet", "engine")
    assert found["tokens_per_s"] == found["turn_by_turn"]["median"] > 0
    (pairs,) = report.as_dict()["first_tokens"]
    assert (pairs["workload"], pairs["pairs"]) == ("W N=2", FEWEST_PAIRS)
    assert pairs["difference_low_s"] <= pairs["difference_s"] <= pairs["difference_high_s"]
    assert 0 < pairs["until_engine_s"] < pairs["outside_engine_s"] < pairs["fleet_ttft_p50_s"]
    assert 0 < pairs["from_engine_s"] < pairs["outside_engine_s"]
    for summary in report.summaries:
        assert summary.middle("output_tokens") == 256
        assert summary.middle("steps") >= 128
        assert summary.middle("mean_batch") > 1.0
        of = ("worker", "server", "reader", "engine") if summary is row else ("engine",)
        assert all(summary.middle(f"{PREFIX}{process}") > 0 for process in of)


def test_cpu_time_is_what_a_process_computed_and_not_how_long_it_took() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        times = CpuTimes({"us": os.getpid(), "waiting": waiting.pid})
        began = time.process_time()
        while time.process_time() < began + 0.05:
            pass
        found = times.figures(output_tokens=1000)
        waiting.communicate(b"\n")
    assert 0.05 <= found[f"{PREFIX}us"] < 60
    assert found[f"{PREFIX}waiting"] >= 0
    with pytest.raises(OSError, match=r"Invalid argument|No such process"):
        cpu_s(waiting.pid)


def test_a_short_turn_is_w_until_the_last_job_has_its_first_token() -> None:
    """One job more begins in each step, at the earliest: none may be over before."""
    work = short_w(8, 1000, seed=1)
    assert [job.prompt for job in work.jobs] == [job.prompt for job in workload_w(8, 1000, 1).jobs]
    assert all(job.output > 8 - number - 1 for number, job in enumerate(work.jobs))
    assert work.jobs[-1].output > 1


def test_pairs_change_who_is_first_and_last_as_long_as_they_may() -> None:
    played: list[tuple[str, int]] = []
    now = 0.0

    class Fleet:
        def first_tokens(self, workload: Workload) -> Turn:
            played.append(("fleet", len(workload.jobs)))
            return Turn(ttft_p50_s=1.5, until_engine_s=0.003, from_engine_s=0.002)

    class Alone:
        def run(self, workload: Workload) -> dict[str, float]:
            nonlocal now
            now += 1.0
            played.append(("alone", len(workload.jobs)))
            return {"ttft_p50_s": 1.0}

    def play(spend_s: float) -> FirstTokens:
        played.clear()
        return in_pairs(
            Fleet(),
            Alone(),
            lambda number: Workload("W", (BenchJob((1,), 1),) * (number + 1)),
            spend_s=spend_s,
            clock=lambda: now,
        )

    assert len(play(0.5).pairs) == FEWEST_PAIRS
    names = [name for name, _ in played]
    assert names[:6] == ["fleet", "alone", "fleet", "alone", "alone", "fleet"]
    sizes = [size for _, size in played]
    assert sizes[::2] == sizes[1::2] == [*range(1, FEWEST_PAIRS + 2)], "the same work in a pair"
    assert len(play(8.0).pairs) == 8
    assert len(play(1e9).pairs) == MOST_PAIRS


def test_the_difference_is_that_within_the_pairs_and_both_are_told() -> None:
    """A machine that slows down between pairs changes both of a pair."""
    pairs = tuple(
        Pair(Turn(drift + added, 0.003, 0.002), drift)
        for drift, added in ((1.0, 0.005), (2.0, 0.004), (9.0, 0.006), (1.0, 0.005), (1.0, 0.005))
    )
    found = FirstTokens("W N=8", pairs)
    figures = found.as_dict()
    assert figures["difference_s"] == pytest.approx(0.005)
    assert 0.004 <= figures["difference_low_s"] <= figures["difference_high_s"] <= 0.0061
    assert figures["outside_engine_s"] == pytest.approx(0.005)
    plain, outside = in_words(found)
    assert "1005.0 ms through Redis, 1000.0 ms by the engine alone: +5.0 ms" in plain
    assert "5.0 ms (3.0 ms from the call of submit to the engine's first step, 2.0 ms" in outside


def test_a_ratio_turn_by_turn_does_not_see_a_machine_that_drifts() -> None:
    pace = (100.0, 30.0, 70.0, 300.0)
    one = Summary("fleet", "W", tuple({"tokens_per_s": 0.9 * now} for now in pace))
    other = Summary("engine", "W", tuple({"tokens_per_s": now} for now in pace))
    found = turn_by_turn(one, other)
    assert found == pytest.approx({"median": 0.9, "low": 0.9, "high": 0.9, "turns": 4.0})


def test_an_interval_is_narrow_where_values_agree_and_the_same_each_time() -> None:
    assert interval([5.0] * 6) == (5.0, 5.0)
    spread = [float(value) for value in range(20)]
    low, high = interval(spread)
    assert 0 < low < 9.5 < high < 19
    assert interval(spread) == (low, high)


async def test_a_fleet_whose_worker_ends_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    fleet = FleetContender(BenchConfig(tmp_path))
    log = tmp_path / "worker.log"
    log.write_text("out of memory")
    fleet._worker = WorkerProcess("bench-1", {}, log)
    fleet._worker._process = await asyncio.create_subprocess_exec("sh", "-c", "exit 7")
    forever = asyncio.get_running_loop().create_future()

    async def playing() -> dict[str, float]:
        await forever
        return {}

    with pytest.raises(BenchFailed, match="code 7:\nout of memory"):
        await fleet._unless_it_ends(playing())
    assert forever.cancelled()


def test_a_static_batch_runs_as_long_as_its_longest_job_and_counts_what_was_asked_for(
    tiny_checkpoint: Path,
) -> None:
    work = Workload("uneven", tuple(BenchJob((1, 2, 3), output) for output in (5, 3, 4)))
    options = {"config": {"model": str(tiny_checkpoint)}, "dtype": "float32"}
    with Child("transformers", options, threads=1) as child:
        figures = child.run(work, batch=2)
    assert figures["steps"] == 5 + 4
    assert figures["output_tokens"] == 5 + 3 + 4


def test_an_engine_that_ends_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match=r"ended with code 1: .*config.json"):
        Child("tokenfleet", {"config": {"model": str(tmp_path)}}, threads=1)


def test_settings_that_slow_an_engine_down_do_not_reach_it(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    for name in UNSET:
        monkeypatch.setenv(name, "1")
    with Child("tokenfleet", {"config": {"model": str(tiny_checkpoint)}}, threads=1) as child:
        environment = Path(f"/proc/{child.pid}/environ").read_bytes().decode()
    assert not any(f"{name}=" in environment for name in UNSET)
    assert all(name in os.environ for name in UNSET), "only the child's environment changes"


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenfleet.worker.commands.cli", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_command_prints_a_table_and_writes_json(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    asked = ("engine", "--model", str(tiny_checkpoint), "-n", "1", "--repeats", "1")
    done = run_bench(*asked, "--threads", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "W N=1" in done.stdout
    assert "blocks in use beyond those that the tokens present need" in done.stdout
    assert "W N=1: engine: CPU s per 1000 tokens: engine " in done.stdout
    written: dict[str, Any] = json.loads(path.read_text())
    assert written["bench"] == "engine"
    assert written["results"][0]["workload"] == "W N=1"
    assert written["machine"]["cores"] == os.cpu_count()


def test_a_model_that_is_not_there_is_bad_input() -> None:
    done = run_bench("engine", "--model", "/nonexistent")
    assert done.returncode == 2
    assert "/nonexistent" in done.stderr
