"""What goes over the wire: the job, its events, its result, its state.

Invariant: `X.unpack(x.pack()) == x`, and bytes that do not come from `pack` raise UndecodableJob.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenfleet.producer.request import MAX_JOB_BYTES, JobRequest
from tokenfleet.producer.sampling_params import SamplingParams
from tokenfleet.producer.states import MOVES, State
from tokenfleet.producer.wire import (
    SCHEMA_VERSION,
    build,
    pack,
    undecodable,
    unpack,
    wire_of,
    write_plain,
)

__all__ = [
    "MAX_JOB_BYTES",
    "MOVES",
    "SCHEMA_VERSION",
    "Choice",
    "Event",
    "EventError",
    "JobRequest",
    "JobResult",
    "JobStatus",
    "SamplingParams",
    "State",
    "Timings",
    "Usage",
]


@dataclass(frozen=True, slots=True)
class EventError:
    """Why a job failed: `code` for programs, `message` for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a job's output. In the log, events follow each other without a gap."""

    offset: int
    """Output tokens of the job, all choices together, logged before this event."""
    choice: int = 0
    attempt: int = 0
    """The claim that made it; 0: made by no worker (cancelled or expired while waiting)."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    """stop, length, cancelled, expired or error, on the last event of a choice and on the last."""
    logprobs: tuple[Mapping[int, float], ...] | None = None
    """One `{token id: logprob}` for each of token_ids."""
    prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None = None
    """Once, on the first event."""
    stop: str | int | None = None
    """The stop text or stop token id that matched."""
    error: EventError | None = None
    final: bool = False
    """True on the one event that ends the stream."""

    @property
    def end(self) -> int:
        """The offset after this event: the subscriber's cursor."""
        return self.offset + len(self.token_ids)

    def pack(self) -> bytes:
        """The bytes for the log."""
        if self._is_plain():
            return write_plain(
                {
                    "v": SCHEMA_VERSION,
                    "offset": self.offset,
                    **({"choice": self.choice} if self.choice else {}),
                    "attempt": self.attempt,
                    "token_ids": self.token_ids,
                    "text": self.text,
                }
            )
        wire = wire_of(self)
        if self.error is not None:
            wire["error"] = [self.error.code, self.error.message]
        return pack(wire)

    def _is_plain(self) -> bool:
        """Tokens and text and nothing else: nearly every event of a fleet."""
        return (
            self.finish_reason is None
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.stop is None
            and self.error is None
            and not self.final
        )

    @classmethod
    def unpack(cls, packed: bytes) -> Event:
        """Back from `pack`."""
        wire = unpack(packed, "event")
        try:
            wire["token_ids"] = tuple(wire.get("token_ids", ()))
            if not wire.keys() <= _PLAIN:
                if "error" in wire:
                    wire["error"] = EventError(*wire["error"])
                _make_tuples(wire, "logprobs", "prompt_logprobs")
        except TypeError as error:
            raise undecodable("event", error) from error
        return build(cls, wire, "event")

    def after(self, offset: int) -> Event:
        """What of this event lies at or behind `offset`.

        Token ids and logprobs are cut exactly. Text cannot be: it stays whole, as it belongs to
        the event and not to its tokens. Cursors that came from events never meet this case.
        """
        behind = offset - self.offset
        if behind <= 0:
            return self
        cut = None if self.logprobs is None else self.logprobs[behind:]
        return replace(self, offset=offset, token_ids=self.token_ids[behind:], logprobs=cut)


_PLAIN = {"offset", "choice", "attempt", "token_ids", "text"}
"""Fields of nearly every event."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a job."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache already held."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a job in seconds, as its last worker saw them; None: not known."""

    queue_s: float | None = None
    """Submission to the last claim."""
    first_token_s: float | None = None
    """Submission to the first token."""
    total_s: float | None = None
    """Submission to the end."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n samples of a job."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    logprobs: tuple[Mapping[int, float], ...] | None = None
    stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a finished job brought. The properties are those of choice 0."""

    choices: tuple[Choice, ...]
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    attempts: int = 1
    """Claims that the job took, the successful one included."""
    prompt_logprobs: tuple[Mapping[int, float] | None, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """As submitted."""
    model: str = ""
    worker: str = ""
    """Who finished it."""

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of choice 0."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of choice 0."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[Mapping[int, float], ...] | None:
        """Logprobs of choice 0."""
        return self.choices[0].logprobs

    def pack(self) -> bytes:
        """The bytes for the job's hash."""
        wire = wire_of(self)
        wire["choices"] = [wire_of(choice) for choice in self.choices]
        for name in ("usage", "timings"):
            if name in wire:
                wire[name] = wire_of(wire[name])
        return pack(wire)

    @classmethod
    def unpack(cls, packed: bytes) -> JobResult:
        """Back from `pack`."""
        wire = unpack(packed, "result")
        try:
            wire["choices"] = tuple(_choice(choice) for choice in wire["choices"])
            wire["usage"] = Usage(**wire.get("usage", {}))
            wire["timings"] = Timings(**wire.get("timings", {}))
            _make_tuples(wire, "prompt_logprobs")
        except (KeyError, TypeError, ValueError) as error:
            raise undecodable("result", error) from error
        return build(cls, wire, "result")


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as its hash has it now."""

    id: str
    state: State
    attempt: int
    """Claims so far; the fencing token."""
    failures: int
    """Counted since the job last made progress."""
    owner: str | None
    """The worker that runs it."""
    offset: int
    """Output tokens logged."""
    model: str
    priority: str
    submitted_ms: int
    """Server's clock, as all times here."""
    due_ms: int | None
    """Not claimed before; None: at once."""
    deadline_ms: int | None
    ended_ms: int | None
    cancel_requested: bool
    served: bool
    """True when a live worker serves the model."""
    paused: bool
    """True while nobody claims from the job's queue."""
    error: EventError | None = None


def _choice(wire: Mapping[str, Any]) -> Choice:
    fields = dict(wire)
    _make_tuples(fields, "token_ids", "logprobs")
    return Choice(**fields)


def _make_tuples(wire: dict[str, Any], *names: str) -> None:
    for name in names:
        if name in wire:
            wire[name] = tuple(wire[name])
