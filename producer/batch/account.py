"""What a run says of itself: how far it is while it runs, and what it came to.

Invariant: its figures are those of the output's tally and of the last look at Redis; nothing is
counted here.
"""

from __future__ import annotations

import time

from tokenfleet.producer.batch.output import Output
from tokenfleet.producer.batch.progress import Progress, Rates, Summary, summary_of
from tokenfleet.producer.batch.remote import Look
from tokenfleet.producer.batch.state import BatchState


class Account:
    """Of one run, from its making on."""

    def __init__(self, output: Output) -> None:
        self.last = Look()
        """What was seen of the jobs that are on their way."""
        self.note: str | None = None
        """Why it does not go on just now."""
        self.resubmitted = 0
        """Jobs that Redis had lost."""
        self._tally = output.tally
        self._rates = Rates(time.monotonic())
        self._tokens_before = output.tally.completion_tokens

    def summary(self, state: BatchState) -> Summary:
        """What the batch has come to."""
        return summary_of(
            state,
            self._tally,
            elapsed_s=time.monotonic() - self._rates.began,
            tokens=self._tally.completion_tokens - self._tokens_before,
            resubmitted=self.resubmitted,
        )

    def progress(self, state: BatchState) -> Progress:
        """How far it is."""
        tally, now = self._tally, time.monotonic()
        tokens = tally.completion_tokens + self.last.tokens
        lines_per_s, tokens_per_s = self._rates.see(now, tally.done, tokens)
        left = state.lines - tally.done
        return Progress(
            batch=state.id,
            phase=state.phase,
            total=state.lines,
            completed=tally.completed,
            failed=tally.failed,
            running=self.last.running,
            waiting=self.last.waiting,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            tokens_per_s=round(tokens_per_s, 1),
            lines_per_s=round(lines_per_s, 1),
            elapsed_s=round(now - self._rates.began, 1),
            left_s=round(left / lines_per_s, 1) if lines_per_s > 0 else None,
            note=self.note,
        )
