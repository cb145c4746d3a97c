"""New output of a choice, until it has an offset and is bytes for the log.

What has become an entry is never changed again: a call whose reply was lost is made again with the
same entries, and the log tells by their boundaries what it has.
"""

from __future__ import annotations

from typing import Any

from tokenfleet.producer.protocol import Event, pack_tokens


class Entry:
    """An event as it goes to the log: its place, and the bytes. 256 of them are made each flush."""

    __slots__ = ("end", "offset", "payload")

    final = False
    """No entry ends a stream: the queue adds the terminal event."""

    def __init__(self, offset: int, end: int, payload: bytes) -> None:
        self.offset = offset
        self.end = end
        self.payload = payload

    def pack(self) -> bytes:
        """The bytes, as Event.pack."""
        return self.payload

    @classmethod
    def of(cls, event: Event) -> Entry:
        """What an earlier attempt has logged."""
        return cls(event.offset, event.end, event.pack())


class Draft:
    """What one choice has made since its last entry."""

    __slots__ = ("extra", "text", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.extra: dict[str, Any] | None = None
        """The other fields of the event; nearly no draft has any."""

    def add(self, **fields: Any) -> None:
        """Set other fields of the event."""
        self.extra = {**(self.extra or {}), **fields}

    def add_logprobs(self, logprobs: list[Any]) -> None:
        """Logprobs of the tokens that came last."""
        if logprobs:
            self.add(logprobs=(*(self.extra or {}).get("logprobs", ()), *logprobs))

    def entry(self, offset: int, choice: int, attempt: int) -> Entry | None:
        """The draft as an entry that starts at `offset`; None when there is nothing in it."""
        token_ids, text = self.token_ids, self.text
        if self.extra is not None:
            event = Event(offset, choice, attempt, tuple(token_ids), text, **self.extra)
            return Entry.of(event)
        if not token_ids and not text:
            return None
        payload = pack_tokens(offset, choice, attempt, token_ids, text)
        return Entry(offset, offset + len(token_ids), payload)
