"""A step between its launch and its result.

A flight holds on to everything its step reads or writes, and is collected once, in the order of
launching. Its parts are what containment split the step into; usually there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tokenfleet.engine.execution.columns import Columns, Ids
from tokenfleet.engine.execution.reports import Report, as_dicts
from tokenfleet.engine.execution.transfers import Wait
from tokenfleet.engine.request import ENGINE_ERROR, NO_TOKEN_ALLOWED, Logprobs
from tokenfleet.engine.scheduling.plan import Chunk

NO_TOKEN = -1
"""What stands in a step's verdicts where no token is due; POISONED where the model broke."""
STUCK = -3
"""Where a sequence's own parameters forbid every token."""


@dataclass(slots=True)
class Note:
    """What came out for one chunk beside its token."""

    logprobs: Logprobs | None = None
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    """(position, report) of the prompt's own tokens."""
    error: str | None = None
    """Why its sequence cannot go on; its KV must not be kept."""
    error_code: str = ENGINE_ERROR


@dataclass(slots=True)
class StepResult:
    """What a step made: a row for each chunk of its plan, in its order."""

    tokens: list[int]
    """The sampled token; NO_TOKEN where the chunk does not sample or is in error."""
    notes: dict[int, Note] = field(default_factory=dict)
    """By row; most steps have none."""


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
    columns: Columns | None = None
    """The same; None where they failed."""
    error: str | None = None
    listings: tuple[Listing, ...] = ()
    arriving: Wait = list
    """Verdicts int64 [S] (a token, NO_TOKEN, STUCK or POISONED), then the listings' tensors."""

    def read(self) -> tuple[Ids, dict[int, Note]]:
        """(tokens int64 [S], notes by row), once the device is there."""
        if self.columns is None:
            rows = range(len(self.work))
            return np.full(len(rows), NO_TOKEN), {row: Note(error=self.error) for row in rows}
        verdicts, *rest = self.arriving()
        tokens: Ids = verdicts.numpy()
        notes: dict[int, Note] = {}
        if tokens.min() < NO_TOKEN:
            rows_in_error = np.flatnonzero(tokens < NO_TOKEN).tolist()
            notes = {row: _in_error(int(tokens[row])) for row in rows_in_error}
        for i, listing in enumerate(self.listings):
            _add(notes, listing, as_dicts(listing.report.wanted, rest[4 * i : 4 * i + 4]))
        return np.where(self.columns.samples & (tokens >= 0), tokens, NO_TOKEN), notes


@dataclass(slots=True)
class Flight:
    """One launched step."""

    parts: list[Part]
    timing: Timing = field(default_factory=Timing)


_BROKEN = "the model produced NaN or infinite values for this sequence"
_STUCK = (
    "no token may be chosen: structured_outputs, allowed_token_ids, bad_words and min_tokens leave "
    "none between them; loosen one of them"
)


def _in_error(verdict: int) -> Note:
    if verdict == STUCK:
        return Note(error=_STUCK, error_code=NO_TOKEN_ALLOWED)
    return Note(error=_BROKEN)


def _add(notes: dict[int, Note], listing: Listing, reports: list[Logprobs]) -> None:
    if listing.rows is None:
        note = notes.setdefault(listing.chunk, Note())
        if note.error is None or note.error_code == NO_TOKEN_ALLOWED:  # the model is sound then
            note.prompt_logprobs += enumerate(reports, listing.position)
    else:
        for row, report in zip(listing.rows.tolist(), reports, strict=True):
            notes.setdefault(row, Note()).logprobs = report


def joined(parts: list[tuple[Part, Ids, dict[int, Note]]]) -> StepResult:
    """The result of a step from what its parts gave.

    Consecutive chunks of one sequence are pieces of a chunk that was too large: they get one row.
    """
    if len(parts) == 1:
        _, tokens, notes = parts[0]
        return StepResult(tokens.tolist(), notes)
    result, last = StepResult([]), None
    for part, tokens, notes in parts:
        for row, (chunk, token) in enumerate(zip(part.work, tokens.tolist(), strict=True)):
            if chunk.sequence is last:
                result.tokens[-1] = token
            else:
                result.tokens.append(token)
            last = chunk.sequence
            if row in notes:
                whole = result.notes.setdefault(len(result.tokens) - 1, Note())
                _merge(whole, notes[row])
    return result


def _merge(whole: Note, piece: Note) -> None:
    whole.logprobs = piece.logprobs or whole.logprobs
    whole.prompt_logprobs += piece.prompt_logprobs
    if whole.error is None:
        whole.error, whole.error_code = piece.error, piece.error_code
