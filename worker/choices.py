"""One of a job's n samples: its tokens, its text, and how it ended, over all attempts.

The text is always what the tokens say: what an earlier attempt had held back is derived from its
logged tokens again, and what it had logged is not said twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenfleet.producer.protocol import Event


class TextDelta(Protocol):
    """New text of a choice (engine/text.py)."""

    @property
    def text(self) -> str: ...
    @property
    def stop(self) -> str | None: ...
    @property
    def num_tokens(self) -> int: ...


class TextStream(Protocol):
    """Tokens to text, one choice long (engine/text.py)."""

    def push(self, token_ids: Sequence[int], *, ended: bool) -> TextDelta: ...


@dataclass(slots=True)
class ChoiceState:
    """One of the n samples."""

    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    """All output tokens, those of earlier attempts included."""
    text: str = ""
    """All text that is logged or drafted."""
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop: str | int | None = None
    skip_chars: int = 0
    """Text that an earlier attempt had logged and this one's stream has yet to say."""

    def replay(self, events: Iterable[Event]) -> str:
        """Take over what earlier attempts logged; returns text that they still held back."""
        for event in events:
            self.token_ids += event.token_ids
            self.text += event.text
            if event.logprobs is not None:
                self.logprobs = self.logprobs or []
                self.logprobs += event.logprobs
            self.finish_reason = event.finish_reason or self.finish_reason
            self.stop = self.stop if event.stop is None else event.stop
        if self.finish_reason or not self.token_ids:
            return ""
        delta = self.stream.push(self.token_ids, ended=False)
        if delta.stop is not None:
            self.finish_reason, self.stop = "stop", delta.stop
        return self._beyond(len(self.text), delta.text)

    def _beyond(self, logged: int, derived: str) -> str:
        self.skip_chars = max(0, logged - len(derived))
        fresh = derived[logged:]
        self.text += fresh
        return fresh

    def push(
        self, token_ids: Sequence[int], reason: str | None
    ) -> tuple[str, Sequence[int], str | None]:
        """New tokens: their text, those of them that count, and the stop text that matched."""
        delta = self.stream.push(token_ids, ended=reason is not None)
        text, count = delta.text, delta.num_tokens
        if self.skip_chars:
            skipped = min(self.skip_chars, len(text))
            self.skip_chars -= skipped
            text = text[skipped:]
        if count != len(token_ids):
            token_ids = token_ids[:count]
        self.token_ids += token_ids
        self.text += text
        return text, token_ids, delta.stop
