"""One job of the demo as its subscriber sees it, and what is wrong with its stream.

Invariant: a stream without a fault has every token once, in order, and has come to a proper end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncJob, Event

ONE_BREATH_S = 0.01


@dataclass(slots=True)
class Watched:
    """What is known of the job. Only whoever follows it changes it."""

    number: int
    prompt: str
    job: AsyncJob | None = None
    trace_id: str = ""
    submitted_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    attempt: int = 0
    workers: list[str] = field(default_factory=list)
    """Who ran it, in order."""
    resumed_at: int | None = None
    """Offset at which another worker went on."""
    faults: list[str] = field(default_factory=list)
    """What is wrong with the stream; empty at the end, or the demo has failed."""

    @property
    def running(self) -> bool:
        return self.first_token_at is not None and self.ended_at is None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.submitted_at

    @property
    def tokens_per_s(self) -> float | None:
        """None where the tokens came in one breath: nobody saw them being made."""
        if self.ended_at is None or self.first_token_at is None or len(self.token_ids) < 2:
            return None
        seen_s = self.ended_at - self.first_token_at
        return (len(self.token_ids) - 1) / seen_s if seen_s > ONE_BREATH_S else None

    def take(self, event: Event, now: float) -> None:
        """Append an event, checking that it follows the one before."""
        if event.offset != len(self.token_ids):
            kind = "gap" if event.offset > len(self.token_ids) else "duplicate"
            self.faults.append(f"{kind} at offset {event.offset}, after {len(self.token_ids)}")
        if event.token_ids and self.first_token_at is None:
            self.first_token_at = now
        self.token_ids += event.token_ids
        self.text += event.text
        if event.final:
            self.ended_at = now
            if event.finish_reason not in ("stop", "length"):
                why = event.error.message if event.error else event.finish_reason
                self.faults.append(f"ended without finishing: {why}")
