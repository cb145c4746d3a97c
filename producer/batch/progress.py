"""How far a batch is, and what it came to.

Invariant: completed + failed + what is left = total; rates are those of the last half minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tokenfleet.producer.batch.state import BatchState, Phase
from tokenfleet.producer.batch.tally import SlowLine, Tally

WINDOW_S = 30.0


@dataclass(frozen=True, slots=True)
class Progress:
    """A batch at one moment."""

    batch: str
    phase: Phase
    total: int
    completed: int
    failed: int
    running: int
    """Jobs that a worker has now."""
    waiting: int
    """Jobs that are in the queue now."""
    prompt_tokens: int
    completion_tokens: int
    """Of completed lines."""
    tokens_per_s: float
    lines_per_s: float
    elapsed_s: float
    """Since this process took it up."""
    left_s: float | None
    """At the present rate; None: not known."""
    note: str | None = None
    """Why it does not go on just now."""

    @property
    def done(self) -> int:
        """Lines that have an output line."""
        return self.completed + self.failed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a batch came to, over all its runs."""

    batch: str
    phase: Phase
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    worker_s: float
    """Seconds that workers had a job of this batch; jobs side by side on one count once."""
    job_s: float
    """Seconds that its jobs ran, each counted."""
    workers: int
    codes: Mapping[str, int]
    """Why lines failed."""
    slowest: tuple[SlowLine, ...]
    output: str
    errors: str
    elapsed_s: float = 0.0
    """Of this run."""
    tokens_per_s: float = 0.0
    """Of this run; 0 where it only collected."""
    resubmitted: int = 0
    """Jobs that Redis had lost, in this run."""

    @property
    def left(self) -> int:
        """Lines without an output line."""
        return self.total - self.completed - self.failed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"left": self.left}


@dataclass(frozen=True, slots=True)
class Glance:
    """A batch as its files show it from outside."""

    batch: str
    phase: Phase
    busy: bool
    """A process is at it."""
    total: int
    completed: int
    failed: int
    created_ms: int
    source: str
    output: str
    errors: str
    progress: Mapping[str, Any]
    """The last Progress that was written down, at most two seconds old while one is at it."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Rates:
    """Lines and tokens a second, from what was seen at which time."""

    def __init__(self, now: float) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self.began = now

    def see(self, now: float, lines: int, tokens: int) -> tuple[float, float]:
        """Take note; lines and tokens a second over the last half minute."""
        self._seen.append((now, lines, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()
        before, lines_before, tokens_before = self._seen[0]
        span_s = now - before
        if span_s <= 0:
            return 0.0, 0.0
        return (lines - lines_before) / span_s, max(0, tokens - tokens_before) / span_s


def summary_of(
    state: BatchState,
    tally: Tally,
    *,
    elapsed_s: float = 0.0,
    tokens: int = 0,
    resubmitted: int = 0,
) -> Summary:
    """The summary; `tokens` are those of the last `elapsed_s`."""
    return Summary(
        batch=state.id,
        phase=state.phase,
        total=state.lines,
        completed=tally.completed,
        failed=tally.failed,
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        cached_tokens=tally.cached_tokens,
        worker_s=round(tally.worker_s, 3),
        job_s=round(tally.job_s, 3),
        workers=tally.num_workers,
        codes=dict(tally.codes),
        slowest=tally.slowest,
        output=state.output,
        errors=state.errors,
        elapsed_s=round(elapsed_s, 3),
        tokens_per_s=round(tokens / elapsed_s, 1) if elapsed_s else 0.0,
        resubmitted=resubmitted,
    )
