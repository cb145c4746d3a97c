"""New output of a choice, until it has an offset and is bytes for the log.

What has become an entry is never changed again: a call whose reply was lost is made again with the
same entries, and the log tells by their boundaries what it has.
"""

from __future__ import annotations

from typing import Any

from tokenfleet.producer.protocol import Event, plain_record
from tokenfleet.producer.wire import write_plain
from tokenfleet.worker.claims import Entries


class Draft:
    """What one choice has made since its last entry. It is kept, and filled again: 256 of them
    become entries in each flush."""

    __slots__ = ("_record", "extra", "text", "token_ids")

    def __init__(self, choice: int, attempt: int) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.extra: dict[str, Any] | None = None
        """The other fields of the event; nearly no draft has any."""
        self._record = plain_record(choice, attempt, self.token_ids)

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

    def under(self, attempt: int) -> None:
        """Let what is in it, and what comes, be this attempt's."""
        self._record["attempt"] = attempt

    def move_to(self, entries: Entries) -> None:
        """Make what is in it the next of the entries."""
        token_ids, record = self.token_ids, self._record
        if self.extra is not None:
            payload = self._event(entries[-1]).pack()
            self.extra = None
        elif token_ids or self.text:
            record["offset"], record["text"] = entries[-1], self.text
            payload = write_plain(record)
        else:
            return
        entries += (payload, entries[-1] + len(token_ids))
        token_ids.clear()
        self.text = ""

    def _event(self, offset: int) -> Event:
        choice, attempt = self._record.get("choice", 0), self._record["attempt"]
        return Event(
            offset, choice, attempt, tuple(self.token_ids), self.text, **(self.extra or {})
        )
