"""Counting what came out of a batch, from its output lines: live, and again after a restart.

Invariant: the tally is a function of the lines in the two files, in any order.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenfleet.producer.batch.records import Record

MOST_SLOW = 5


@dataclass(frozen=True, slots=True, order=True)
class SlowLine:
    """A line that took long."""

    run_s: float
    """From its last claim to the end."""
    line: int
    custom_id: str
    total_s: float
    """From submission to the end; how long it waited depends on those before it."""
    tokens: int


@dataclass(slots=True)
class Busy:
    """The time that one worker was busy, as spans that do not touch."""

    _begins: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def add(self, begin_ms: int, end_ms: int) -> None:
        """One job's run; what overlaps counts once."""
        if end_ms <= begin_ms:
            return
        first = bisect_left(self._ends, begin_ms)
        last = bisect_right(self._begins, end_ms)
        if first < last:
            begin_ms = min(begin_ms, self._begins[first])
            end_ms = max(end_ms, self._ends[last - 1])
        self._begins[first:last] = [begin_ms]
        self._ends[first:last] = [end_ms]

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return (sum(self._ends) - sum(self._begins)) / 1000


@dataclass(slots=True)
class Tally:
    """Sums over the lines that are done."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    job_s: float = 0.0
    """Seconds that jobs ran, those side by side each counted."""
    codes: Counter[str] = field(default_factory=Counter)
    """Why lines failed."""
    _slowest: list[SlowLine] = field(default_factory=list)
    _workers: dict[str, Busy] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Lines that have an output line."""
        return self.completed + self.failed

    @property
    def slowest(self) -> tuple[SlowLine, ...]:
        """The slowest lines, slowest first."""
        return tuple(sorted(self._slowest, reverse=True))

    @property
    def worker_s(self) -> float:
        """Seconds that workers had a job of this batch, those side by side counted once."""
        return sum(busy.total_s for busy in self._workers.values())

    @property
    def num_workers(self) -> int:
        """Workers that finished at least one line."""
        return len(self._workers)

    def add(self, record: Record) -> None:
        """Count one line."""
        if record.failed:
            self.failed += 1
            self.codes[_code(record.content)] += 1
            return
        self.completed += 1
        body = record.content["response"]["body"]
        usage = body["usage"]
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self._time(record, body["tokenfleet"], usage["completion_tokens"])

    def _time(self, record: Record, own: Mapping[str, Any], tokens: int) -> None:
        begin, end = own["claimed_ms"], own["ended_ms"]
        run_s = max(0, end - begin) / 1000 if begin and end else 0.0
        self.job_s += run_s
        self._workers.setdefault(own["worker"], Busy()).add(begin, end)
        custom_id = record.content["custom_id"]
        slow = SlowLine(run_s, record.line, custom_id, own["total_s"] or 0.0, tokens)
        push = heapq.heappush if len(self._slowest) < MOST_SLOW else heapq.heappushpop
        push(self._slowest, slow)


def _code(content: Mapping[str, Any]) -> str:
    """Why a line failed."""
    error = content["error"] or content["response"]["body"]["error"]
    return str(error["code"])
