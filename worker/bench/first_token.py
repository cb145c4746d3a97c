"""What the way through Redis adds to the first token, from short turns in pairs, and where.

A pair is one workload through Redis and by the engine alone, right after one another and now the
one, now the other first. The machine drifts by more within minutes than the two differ; so the
difference is taken within each pair, and its median has an interval beside it.

Where the engine's own noise hides a few milliseconds, two times that one clock measures say more:
from the call of submit until the engine begins its first step, and from a first token leaving the
engine's step until its reader has it. They are no replacement for the difference: an engine that
computes slower because others use its cores does not show in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from tokenfleet.worker.bench.figures import interval
from tokenfleet.worker.bench.workloads import BenchJob, Workload, workload_w

FEWEST_PAIRS, MOST_PAIRS = 5, 60


@dataclass(frozen=True, slots=True)
class Turn:
    """One workload through Redis; seconds."""

    ttft_p50_s: float
    until_engine_s: float
    """From the call of submit until the engine begins its first step."""
    from_engine_s: float
    """Of the median job: from the end of the step that made its first token to the reader."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same workload by both."""

    fleet: Turn
    alone_s: float
    """The engine alone: from the first request to the first token of the median job."""

    @property
    def difference_s(self) -> float:
        return self.fleet.ttft_p50_s - self.alone_s


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """All pairs of one workload."""

    workload: str
    pairs: tuple[Pair, ...]

    def as_dict(self) -> dict[str, Any]:
        differences = [pair.difference_s for pair in self.pairs]
        low, high = interval(differences)
        return {
            "workload": self.workload,
            "pairs": len(self.pairs),
            "fleet_ttft_p50_s": median(pair.fleet.ttft_p50_s for pair in self.pairs),
            "engine_ttft_p50_s": median(pair.alone_s for pair in self.pairs),
            "difference_s": median(differences),
            "difference_low_s": low,
            "difference_high_s": high,
            "differences_s": differences,
            "until_engine_s": median(pair.fleet.until_engine_s for pair in self.pairs),
            "from_engine_s": median(pair.fleet.from_engine_s for pair in self.pairs),
            "outside_engine_s": median(
                pair.fleet.until_engine_s + pair.fleet.from_engine_s for pair in self.pairs
            ),
        }


class Fleet(Protocol):
    """What plays a turn through Redis."""

    def first_tokens(self, workload: Workload) -> Turn: ...


class Alone(Protocol):
    """The engine alone."""

    def run(self, workload: Workload) -> dict[str, float]: ...


def short_w(count: int, vocab_size: int, seed: int) -> Workload:
    """W, of which each job ends soon after the last one has its first token: until then it is W."""
    jobs = enumerate(workload_w(count, vocab_size, seed).jobs)
    made = [BenchJob(job.prompt, count - number + 1) for number, job in jobs]
    return Workload(f"W N={count}", tuple(made))


def in_pairs(
    fleet: Fleet,
    alone: Alone,
    make: Callable[[int], Workload],
    *,
    spend_s: float,
    clock: Callable[[], float],
) -> FirstTokens:
    """Pairs until the time is over, at least FEWEST_PAIRS; one before them is not counted.

    `make`: the workload of a pair, from its number.
    """
    pairs: list[Pair] = []
    workload = make(0)
    _pair(fleet, alone, workload, fleet_first=True)
    until = clock() + spend_s
    while len(pairs) < FEWEST_PAIRS or (len(pairs) < MOST_PAIRS and clock() < until):
        workload = make(1 + len(pairs))
        pairs.append(_pair(fleet, alone, workload, fleet_first=len(pairs) % 2 == 0))
    return FirstTokens(workload.name, tuple(pairs))


def _pair(fleet: Fleet, alone: Alone, workload: Workload, *, fleet_first: bool) -> Pair:
    if fleet_first:
        turn = fleet.first_tokens(workload)
        return Pair(turn, alone.run(workload)["ttft_p50_s"])
    alone_s = alone.run(workload)["ttft_p50_s"]
    return Pair(fleet.first_tokens(workload), alone_s)


def in_words(found: FirstTokens) -> list[str]:
    """For people."""
    figures = found.as_dict()
    ms = {name: value * 1e3 for name, value in figures.items() if isinstance(value, float)}
    plain = ms["fleet_ttft_p50_s"] - ms["engine_ttft_p50_s"]
    return [
        f"{found.workload}: first token of the median job, {len(found.pairs)} short pairs: "
        f"{ms['fleet_ttft_p50_s']:.1f} ms through Redis, {ms['engine_ttft_p50_s']:.1f} ms by the "
        f"engine alone: {plain:+.1f} ms; within a pair {ms['difference_s']:+.1f} ms (95 % of "
        f"resamples: {ms['difference_low_s']:+.1f} to {ms['difference_high_s']:+.1f} ms)",
        f"{found.workload}: outside of the engine, measured: {ms['outside_engine_s']:.1f} ms "
        f"({ms['until_engine_s']:.1f} ms from the call of submit to the engine's first step, "
        f"{ms['from_engine_s']:.1f} ms from the engine to the reader)",
    ]
