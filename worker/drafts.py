"""New output of a choice, until it has an offset and is bytes for the log.

What has become an entry is never changed again: a call whose reply was lost is made again with the
same entries, and the log tells by their boundaries what it has.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenfleet.producer.protocol import Event
from tokenfleet.producer.wire import SCHEMA_VERSION


class Draft(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one choice has made since its last entry: kept, emptied by `take`, and filled again.

    Where it has no `extra` its fields are those of the event, so that `pack_draft` writes what
    Event.pack would: a flush does it 256 times.
    """

    v: int
    offset: int
    """Set when it becomes an entry."""
    choice: int = 0
    attempt: int
    token_ids: list[int]
    text: str
    extra: dict[str, Any] | None = None
    """The other fields of the event; nearly no draft has any."""

    def __bool__(self) -> bool:
        """Whether there is anything in it."""
        return bool(self.token_ids or self.text or self.extra)

    def add(self, **fields: Any) -> None:
        """Set other fields of the event."""
        self.extra = {**(self.extra or {}), **fields}

    def add_logprobs(self, logprobs: list[Any]) -> None:
        """Logprobs of the tokens that came last."""
        if logprobs:
            self.add(logprobs=(*(self.extra or {}).get("logprobs", ()), *logprobs))

    def event(self) -> Event:
        """What is in it as an event."""
        return Event(
            offset=self.offset,
            choice=self.choice,
            attempt=self.attempt,
            token_ids=tuple(self.token_ids),
            text=self.text,
            **(self.extra or {}),
        )


pack_draft = msgspec.msgpack.Encoder().encode
"""The bytes of a draft without `extra`."""


def new_draft(choice: int, attempt: int) -> Draft:
    """An empty one."""
    return Draft(v=SCHEMA_VERSION, offset=0, choice=choice, attempt=attempt, token_ids=[], text="")
