"""One job on this worker, from its claim to its end: tokens in, events for the log out.

    claimed --prepare--> ready --launch--> running --> ended --> gone
       |                   |                  |'-- hand back --> leaving --> gone
       '------------------ '-- cancel, expiry, refusal, loss, hand back

A leaving job hears nothing more of its engine: that says "cancelled" of what was only taken away.

Every output token of the job is in exactly one place: the log, the entries on their way there, or
the drafts behind them (drafts.py). The three follow each other without a gap.

What a flush does to all jobs are functions on many, `take` and `arrived`: it is 256 jobs, 40 times
a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tokenfleet.engine.request import ENGINE_ERROR, EngineRequest
from tokenfleet.producer.keys import partition_of
from tokenfleet.producer.protocol import Choice, Event, EventError, JobResult, Timings, Usage
from tokenfleet.worker.choices import ChoiceState, TextStream
from tokenfleet.worker.claims import Emission, Entries
from tokenfleet.worker.drafts import Draft, new_draft, pack_draft
from tokenfleet.worker.engine_link.engine_process import StepEvent
from tokenfleet.worker.queue import ClaimedJob


class Stage(StrEnum):
    """How far a job has come on this worker."""

    CLAIMED = "claimed"
    READY = "ready"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDED = "ended"
    GONE = "gone"


MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.CLAIMED: frozenset({Stage.READY, Stage.LEAVING, Stage.ENDED, Stage.GONE}),
    Stage.READY: frozenset({Stage.RUNNING, Stage.LEAVING, Stage.ENDED, Stage.GONE}),
    Stage.RUNNING: frozenset({Stage.LEAVING, Stage.ENDED, Stage.GONE}),
    Stage.LEAVING: frozenset({Stage.ENDED, Stage.GONE}),
    Stage.ENDED: frozenset({Stage.GONE}),
    Stage.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ends."""

    state: str
    """finished, failed, cancelled or expired."""
    error: EventError | None = None


class Job:
    """A claimed job. Whoever moves it on is the only one that may: see MOVES.

    Args:
        claimed: from the queue.
        now: monotonic seconds at the claim; deadlines are counted from it.
    """

    def __init__(self, claimed: ClaimedJob, now: float | None = None) -> None:
        self.claimed = claimed
        """Under which attempt it is ours; changed once, when Redis forgot the job (`adopted`)."""
        self.origin = claimed
        """As it was claimed."""
        self.id = claimed.id
        self.engine_id = f"{claimed.id}/{claimed.attempt}"
        """The attempt is part of it: a job claimed again never meets its old self."""
        self.partition = partition_of(claimed.id)
        self.claimed_at = time.monotonic() if now is None else now
        self.lease_until = 0.0
        """Monotonic; set by whoever renews."""
        self.stage = Stage.CLAIMED
        self.ending: Ending | None = None
        self.request: EngineRequest
        self.choices: list[ChoiceState] = []
        self.logged = claimed.offset
        """Output tokens in the log, all choices together."""
        self.payloads = [event.pack() for event in claimed.logged]
        """The events logged or on their way, as bytes: Redis may have to be told again."""
        self.drafts: list[Draft] = []
        """One for each choice."""
        self.in_flight: Entries = []
        """Entries handed to Redis whose reply has not come. It is one list from claim to end."""
        self.emission: Emission = (claimed.id, claimed.attempt, self.in_flight)
        """They, as emit takes them."""
        self.suspended = False
        """Whether nothing may be published: it is being found out whose the job is."""
        self.timer: asyncio.TimerHandle | None = None
        """Goes off at the deadline."""
        self.first_token_at: float | None = None
        """Monotonic, in this attempt."""
        self._prompt_logprobs: tuple[Any, ...] | None = next(
            (e.prompt_logprobs for e in claimed.logged if e.prompt_logprobs is not None), None
        )

    @property
    def deadline_at(self) -> float | None:
        """Monotonic; the server's deadline, counted from the claim."""
        if self.claimed.deadline_ms is None:
            return None
        return self.claimed_at + (self.claimed.deadline_ms - self.claimed.claimed_ms) / 1000

    @property
    def slots(self) -> int:
        """Slots that it holds or is about to hold."""
        if self.stage in (Stage.LEAVING, Stage.ENDED, Stage.GONE):
            return 0
        if not self.choices:
            return self.claimed.request.sampling.n
        return sum(choice.finish_reason is None for choice in self.choices)

    @property
    def computed(self) -> int:
        """Tokens that another attempt would have to compute again; 0 before its first token."""
        if self.first_token_at is None:
            return 0
        made = sum(len(choice.token_ids) for choice in self.choices)
        return len(self.request.prompt_token_ids) + made

    @property
    def suspect(self) -> bool:
        """Whether it was there when an engine died, and has not made a token since."""
        return self.claimed.failures > 0 and self.first_token_at is None

    @property
    def dirty(self) -> bool:
        """Whether the publisher has something to do for it."""
        return bool(any(self.drafts) or self.in_flight or self.ending)

    @property
    def history(self) -> Entries:
        """All that is in the log."""
        logged = self.payloads[: len(self.payloads) - len(self.in_flight) // 2]
        entries: Entries = [0] if logged else []
        for payload in logged:
            entries += (payload, Event.unpack(payload).end)
        return entries

    def move(self, stage: Stage) -> None:
        """One step through MOVES."""
        if stage not in MOVES[self.stage]:
            raise RuntimeError(f"job {self.id} cannot go from {self.stage} to {stage}")
        self.stage = stage

    def replayed(self, streams: Sequence[TextStream]) -> list[tuple[ChoiceState, str]]:
        """Each choice as earlier attempts logged it, and text that they still held back.

        Changes nothing of the job: a thread may do it while the job is cancelled or lost.
        """
        logged = self.claimed.logged
        choices = [ChoiceState(stream) for stream in streams]
        return [
            (choice, choice.replay(event for event in logged if event.choice == index))
            for index, choice in enumerate(choices)
        ]

    def prepared(self, request: EngineRequest, replayed: list[tuple[ChoiceState, str]]) -> None:
        """Take the engine's request and what `replayed` gave; `ready` follows."""
        self.request = request
        for index, (choice, held) in enumerate(replayed):
            draft = new_draft(index, self.claimed.attempt)
            draft.text = held
            self.drafts.append(draft)
            self.choices.append(choice)

    def ready(self) -> None:
        """It may be launched; or its log holds all of it already, and it ends."""
        self.move(Stage.READY)
        self._end_if_done()

    def apply(self, event: StepEvent) -> bool:
        """Take new tokens of one choice.

        Returns: True when a stop text ended the choice, which the engine does not know yet.
        """
        index, reason = event.choice, event.finish_reason
        choice = self.choices[index]
        if choice.finish_reason is not None or self.stage is not Stage.RUNNING:
            return False
        text, token_ids, stop = choice.push(event.token_ids, reason)
        if reason in ("cancelled", "error"):
            stop = None  # half a character may be left that becomes a stop string
        draft = self.drafts[index]
        draft.token_ids += token_ids
        draft.text += text
        if event.logprobs is not None:
            kept = event.logprobs[: len(token_ids)]
            draft.add_logprobs(kept)
            choice.logprobs = choice.logprobs or []
            choice.logprobs += kept
        if event.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = tuple(event.prompt_logprobs)
            draft.add(prompt_logprobs=self._prompt_logprobs)
        if self.first_token_at is None and token_ids:
            self.first_token_at = time.monotonic()
        if event.error is not None:
            error = EventError(event.error_code or ENGINE_ERROR, event.error)
            self.end(Ending("failed", error))
        if stop is not None:
            reason = "stop"
        if reason is not None:
            choice.finish_reason = reason
            choice.stop = self._what_stopped(choice, stop, reason)
            draft.add(finish_reason=reason, stop=choice.stop)
            self._end_if_done()
        return stop is not None and event.finish_reason is None

    def end(self, ending: Ending) -> None:
        """The job ends here; the first ending stands."""
        if self.stage in (Stage.ENDED, Stage.GONE):
            return
        self.ending = ending
        self.move(Stage.ENDED)

    @property
    def adoptable(self) -> bool:
        """Whether Redis may be asked to take it back; once is a flush, twice is no accident."""
        return self.claimed is self.origin and not self.suspended

    def adopted(self, claimed: ClaimedJob) -> None:
        """It is ours again, under a new attempt and with its log written again."""
        self.claimed = claimed
        self.emission = (claimed.id, claimed.attempt, self.in_flight)
        for draft in self.drafts:
            draft.attempt = claimed.attempt
        self.suspended = False

    def result(self, now: float | None = None) -> JobResult:
        """What the job came to, all attempts together."""
        choices = tuple(
            Choice(
                text=choice.text,
                token_ids=tuple(choice.token_ids),
                finish_reason=choice.finish_reason,
                logprobs=None if choice.logprobs is None else tuple(choice.logprobs),
                stop=choice.stop,
            )
            for choice in self.choices
        )
        return JobResult(
            choices=choices,
            usage=Usage(
                prompt_tokens=len(self.request.prompt_token_ids),
                completion_tokens=sum(len(choice.token_ids) for choice in choices),
            ),
            timings=self._timings(time.monotonic() if now is None else now),
            attempts=self.claimed.attempt,
            prompt_logprobs=self._prompt_logprobs,
            metadata=self.claimed.request.metadata,
            model=self.claimed.request.model,
        )

    def _timings(self, now: float) -> Timings:
        waited = (self.claimed.claimed_ms - self.claimed.submitted_ms) / 1000
        first = self.first_token_at
        resumed = self.claimed.offset > 0
        return Timings(
            queue_s=waited,
            first_token_s=None if first is None or resumed else waited + first - self.claimed_at,
            total_s=waited + now - self.claimed_at,
        )

    def _what_stopped(self, choice: ChoiceState, stop: str | None, reason: str) -> str | int | None:
        if stop is not None:
            return stop
        last = choice.token_ids[-1] if choice.token_ids else None
        return last if reason == "stop" and last in self.request.params.stop_token_ids else None

    def _end_if_done(self) -> None:
        if self.choices and all(choice.finish_reason is not None for choice in self.choices):
            self.end(Ending("finished"))


def take(jobs: Iterable[Job]) -> tuple[list[Job], list[Emission]]:
    """Make entries of what is in the jobs' drafts, behind those whose reply was lost.

    Returns the jobs that have any in flight now, and what emit takes of these.
    """
    taken: list[Job] = []
    emissions: list[Emission] = []
    for job in jobs:
        entries = job.in_flight
        for draft in job.drafts:
            token_ids = draft.token_ids
            draft.offset = offset = entries[-1] if entries else job.logged
            if draft.extra is not None:
                payload = draft.event().pack()
                draft.extra = None
            elif token_ids or draft.text:
                payload = pack_draft(draft)
            else:
                continue
            if not entries:
                entries.append(offset)
            job.payloads.append(payload)
            entries.append(payload)
            entries.append(offset + len(token_ids))
            token_ids.clear()
            draft.text = ""
        if entries:
            taken.append(job)
            emissions.append(job.emission)
    return taken, emissions


def arrived(jobs: Iterable[Job]) -> None:
    """What `take` gave of these jobs is in the log."""
    for job in jobs:
        entries = job.in_flight
        if entries:
            job.logged = entries[-1]
            entries.clear()
