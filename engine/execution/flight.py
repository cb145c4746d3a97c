"""A step between its launch and its result.

A flight holds on to everything its step reads or writes, and is collected once, in the order of
launching. Its parts are what containment split the step into; usually there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenfleet.engine.execution.reports import Report, as_dicts
from tokenfleet.engine.execution.transfers import Wait
from tokenfleet.engine.request import Logprobs
from tokenfleet.engine.scheduling.plan import Chunk
from tokenfleet.kernels.step import POISONED

Ids = NDArray[np.int64]

NOT_SAMPLED = -1
"""What stands in a step's verdicts where no token is due; POISONED where the model broke."""


@dataclass(slots=True)
class Outcome:
    """What came out for one chunk."""

    chunk: Chunk
    token: int = -1
    """The sampled token; -1 when the chunk does not sample."""
    logprobs: Logprobs | None = None
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    error: str | None = None
    """Why its sequence cannot go on; its KV must not be kept."""


@dataclass(slots=True)
class Timing:
    """Where a step's time went, in seconds, and what went wrong in it.

    Where the device runs beside the host, forward_s is the time to launch the step and sample_s
    that of waiting for its result.
    """

    forward_s: float = 0.0
    sample_s: float = 0.0
    out_of_memory: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """A Report and where its rows belong."""

    report: Report
    rows: Ids | None
    """Indices into the part's work, for output tokens."""
    chunk: int = -1
    """For prompt tokens: the index of their chunk,"""
    position: int = 0
    """and the position of the first of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks that went through the model together, or failed together."""

    work: list[Chunk]
    error: str | None = None
    listings: tuple[Listing, ...] = ()
    arriving: Wait = list
    """Verdicts int64 [S] (a token, NOT_SAMPLED or POISONED), then the listings' tensors."""

    def outcomes(self) -> list[Outcome]:
        """Wait for the device and read what it made."""
        if self.error is not None:
            return [Outcome(chunk, error=self.error) for chunk in self.work]
        verdicts, *rest = self.arriving()
        pairs = zip(self.work, verdicts.tolist(), strict=True)
        found = [_outcome(chunk, verdict) for chunk, verdict in pairs]
        for i, listing in enumerate(self.listings):
            _fill(found, listing, as_dicts(listing.report.wanted, rest[4 * i : 4 * i + 4]))
        return found


@dataclass(slots=True)
class Flight:
    """One launched step."""

    parts: list[Part]
    timing: Timing = field(default_factory=Timing)

    def outcomes(self) -> Iterator[Outcome]:
        """One a chunk of the plan, in its order; waits for the device."""
        last: Outcome | None = None
        for part in self.parts:
            for outcome in part.outcomes():
                if last is not None and last.chunk.sequence is outcome.chunk.sequence:
                    last = _joined(last, outcome)  # the halves of a chunk that was too large
                    continue
                if last is not None:
                    yield last
                last = outcome
        if last is not None:
            yield last


def _outcome(chunk: Chunk, verdict: int) -> Outcome:
    if verdict == POISONED:
        reason = "the model produced NaN or infinite values for this sequence"
        return Outcome(chunk, error=reason)
    return Outcome(chunk, token=verdict if chunk.samples else -1)


def _fill(outcomes: list[Outcome], listing: Listing, reports: list[Logprobs]) -> None:
    if listing.rows is None:
        outcome = outcomes[listing.chunk]
        if outcome.error is None:
            outcome.prompt_logprobs += enumerate(reports, listing.position)
    else:
        for row, report in zip(listing.rows.tolist(), reports, strict=True):
            outcomes[row].logprobs = report


def _joined(first: Outcome, second: Outcome) -> Outcome:
    """One outcome for two consecutive chunks of a sequence."""
    a, b = first.chunk, second.chunk
    whole = Chunk(a.sequence, a.start, a.count + b.count, b.samples)
    reports = first.prompt_logprobs + second.prompt_logprobs
    error = first.error or second.error
    return Outcome(whole, second.token, second.logprobs, reports, error)
