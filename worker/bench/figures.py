"""From times to figures: what one run says, and what several runs say together.

Times are seconds on one clock. A figure of several runs is their median, with the span from the
lowest to the highest beside it: on a machine that others use, a mean would be of the noise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

RESAMPLES = 2000


@dataclass(slots=True)
class Seen:
    """One job of a run: when it was asked for, and when its tokens came."""

    asked_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time, and how many tokens came together then."""

    def tokens(self, now: float, count: int) -> None:
        if count:
            self.arrivals.append((now, count))

    @property
    def count(self) -> int:
        return sum(count for _, count in self.arrivals)


def figures_of(jobs: Sequence[Seen]) -> dict[str, float]:
    """Throughput and latencies of one run, from the first request to the last token."""
    began = min(job.asked_at for job in jobs)
    ended = max(job.arrivals[-1][0] for job in jobs)
    first = [job.arrivals[0][0] - job.asked_at for job in jobs]
    paces = [
        (job.arrivals[-1][0] - job.arrivals[0][0]) / (job.count - job.arrivals[0][1])
        for job in jobs
        if job.count > job.arrivals[0][1]
    ]
    gaps = [
        later[0] - earlier[0]
        for job in jobs
        for earlier, later in zip(job.arrivals, job.arrivals[1:])
    ]
    tokens = sum(job.count for job in jobs)
    return {
        "output_tokens": tokens,
        "wall_s": ended - began,
        "tokens_per_s": tokens / (ended - began),
        "ttft_mean_s": sum(first) / len(first),
        "ttft_p50_s": percentile(first, 50),
        "ttft_p99_s": percentile(first, 99),
        "tpot_p50_s": percentile(paces, 50),
        "tpot_p99_s": percentile(paces, 99),
        "gap_p99_s": percentile(gaps, 99),
        "completion_mean_s": sum(j.arrivals[-1][0] - j.asked_at for j in jobs) / len(jobs),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` percent of them do not exceed; 0 of none."""
    if not values:
        return 0.0
    ranked = sorted(values)
    rank = max(1, -(-len(ranked) * share // 100))
    return ranked[int(rank) - 1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """In which the medians of 95 % of the resamples of these values lie."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(RESAMPLES * 0.025)], medians[int(RESAMPLES * 0.975) - 1]


@dataclass(frozen=True, slots=True)
class Summary:
    """Several runs of one workload on one engine."""

    engine: str
    workload: str
    runs: tuple[Mapping[str, float], ...]

    def middle(self, name: str) -> float:
        return median(run[name] for run in self.runs)

    def span(self, name: str) -> tuple[float, float]:
        values = [run[name] for run in self.runs]
        return min(values), max(values)

    def has(self, name: str) -> bool:
        return all(name in run for run in self.runs)

    def as_dict(self) -> dict[str, object]:
        names = [name for name in self.runs[0] if self.has(name)]
        return {
            "engine": self.engine,
            "workload": self.workload,
            "repeats": len(self.runs),
            "median": {name: self.middle(name) for name in names},
            "lowest": {name: self.span(name)[0] for name in names},
            "highest": {name: self.span(name)[1] for name in names},
        }


def ratio(one: Summary, other: Summary, name: str = "tokens_per_s") -> float:
    """How often `other` fits into `one`, by medians of the same run."""
    return one.middle(name) / other.middle(name)


def turn_by_turn(one: Summary, other: Summary, name: str = "tokens_per_s") -> dict[str, float]:
    """The same within each repeat, where both ran right after one another: the median, and in
    which range those of 95 % of the resamples lie. The machine drifts less in there."""
    found = [mine[name] / theirs[name] for mine, theirs in zip(one.runs, other.runs)]
    low, high = interval(found)
    return {"median": median(found), "low": low, "high": high, "turns": float(len(found))}
