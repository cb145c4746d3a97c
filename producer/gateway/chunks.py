"""From a job's events to the frames of a streamed completion, and back from a frame's id.

A frame's id is `<job id>/<offset>` with the offset behind it: a reader that lost the connection
comes again with the last id it saw and gets what lies behind. An event without tokens does not move
the offset, so it is counted as well: `<job id>/<offset>+<count>`.

Invariant: an id names one place in the job's log, the same for every reader and at any time.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tokenfleet.producer.batch import ResponseShape, failed_answer, usage_of
from tokenfleet.producer.errors import (
    DeadlineExceeded,
    InvalidJob,
    JobCancelled,
    TokenfleetError,
)
from tokenfleet.producer.gateway.answers import GatewayError, answer_of, refused
from tokenfleet.producer.gateway.sse import DONE, frame
from tokenfleet.producer.job import AsyncJob
from tokenfleet.producer.keys import partition_of
from tokenfleet.producer.protocol import Event

_PLACE = re.compile(r"([^/]{1,80})/(\d{1,12})(?:\+(\d{1,6}))?")


@dataclass(frozen=True, slots=True)
class Place:
    """How far a reader has come in a job's log."""

    job_id: str
    offset: int = 0
    """Output tokens seen."""
    quiet: int = 0
    """Events without tokens seen at this offset."""

    def __str__(self) -> str:
        return f"{self.job_id}/{self.offset}" + (f"+{self.quiet}" if self.quiet else "")

    @classmethod
    def read(cls, text: str) -> Place:
        """Back from `str`. Raises GatewayError 400."""
        match = _PLACE.fullmatch(text.strip())
        try:
            if match is None:
                raise InvalidJob("Last-Event-ID", text, "must be an id that a stream gave")
            partition_of(match[1])
        except InvalidJob as error:
            raise refused(400, "invalid_value", str(error), "Last-Event-ID") from None
        return cls(match[1], int(match[2]), int(match[3] or 0))

    def after(self, event: Event) -> Place:
        """Where a reader is that has seen this event too."""
        if event.token_ids:
            return Place(self.job_id, event.end)
        return Place(self.job_id, self.offset, self.quiet + 1)


def created_s(job_id: str) -> int:
    """When a job was made: its id begins with the milliseconds."""
    return int(job_id[:13].replace("-", ""), 16) // 1000


@dataclass(slots=True)
class Completion:
    """One reader's stream of one job."""

    job: AsyncJob
    shape: ResponseShape
    place: Place
    """Where the reader begins; then, how far it has been served."""
    include_usage: bool = False
    on_event: Callable[[Event], None] = lambda _: None
    ended: bool = False
    """The terminal event was there."""

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The whole stream.

        Raises GatewayError and what the stream raises before the first frame only; what goes wrong
        later is a frame.
        """
        begun, answer = False, None
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
                    begun = True
        except (TokenfleetError, GatewayError) as error:
            if not begun:
                raise
            answer, _ = answer_of(error)
        if answer is not None:
            yield frame(json.dumps(answer.body), str(self.place))
        yield DONE

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Raises GatewayError when the job ended without success."""
        greeted = set[int]()
        fresh, skip = not self.place.offset and not self.place.quiet, self.place.quiet
        self.place = Place(self.place.job_id, self.place.offset)
        async with aclosing(self._events()) as events:
            async for event in events:
                self.place = self.place.after(event)
                if not event.token_ids and skip:
                    skip -= 1
                elif not event.final:
                    greet = fresh and event.choice not in greeted
                    greeted.add(event.choice)
                    yield frame(self._chunk(event, greet=greet), str(self.place))
                if event.final:
                    _raise_what_ended_it(self.place.job_id, event)
        if self.include_usage:
            usage = usage_of((await self.job.result()).usage)
            yield frame(self._packed([], usage=usage), str(self.place))

    async def _events(self) -> AsyncGenerator[Event, None]:
        stream = self.job.stream(self.place.offset)
        async with aclosing(stream):
            async for event in stream:
                self.ended = event.final
                self.on_event(event)
                yield event

    def _chunk(self, event: Event, *, greet: bool) -> str:
        logprobs = self.shape.shaped_logprobs(event.token_ids, event.logprobs)
        choice: dict[str, Any] = {"index": event.choice}
        if self.shape.is_chat:
            delta = {"role": "assistant"} if greet else {}
            ends_only = event.finish_reason is not None and not event.text and not greet
            choice["delta"] = delta if ends_only else {**delta, "content": event.text}
        else:
            choice["text"] = event.text
        choice |= {"logprobs": logprobs, "finish_reason": event.finish_reason}
        return self._packed([choice])

    def _packed(self, choices: list[dict[str, Any]], usage: Any = None) -> str:
        job_id = self.place.job_id
        chunk: dict[str, Any] = {
            "id": self.shape.response_id(job_id),
            "object": "chat.completion.chunk" if self.shape.is_chat else "text_completion",
            "created": created_s(job_id),
            "model": self.shape.model,
            "choices": choices,
        }
        if self.include_usage:
            chunk["usage"] = usage
        return json.dumps(chunk, separators=(",", ":"))


def _raise_what_ended_it(job_id: str, event: Event) -> None:
    """Raises GatewayError, JobCancelled or DeadlineExceeded for a terminal event that says so."""
    if event.error is not None:
        raise GatewayError(failed_answer(event.error.code, event.error.message))
    if event.finish_reason == "cancelled":
        raise JobCancelled(job_id)
    if event.finish_reason == "expired":
        raise DeadlineExceeded(job_id)
