"""Finds stop strings in text that arrives in pieces.

What is let out never contains a stop string nor the beginning of one that may still complete, and
where the text ends does not depend on how it was cut into pieces: the match that completes first
counts, of two that complete together the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back at most the longest unfinished beginning of a stop string.

    Args:
        stops: strings that end the text.
        include: let the matched string out at the end of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""

    def __bool__(self) -> bool:
        """Whether there is a stop string to find."""
        return bool(self._stops)

    def push(self, text: str, *, may_stop: bool = True) -> Released:
        """Take more text. With `may_stop` False a complete match is let through."""
        if not self._stops:
            return Released(text)
        held, self._held = self._held, ""
        text = held + text
        match = self._first_match(text, len(held)) if may_stop else None
        if match is not None:
            end, stop = match
            return Released(text[:end] if self._include else text[: end - len(stop)], stop)
        keep = self._unfinished(text)
        self._held = text[len(text) - keep :]
        return Released(text[: len(text) - keep])

    def copy(self) -> StopMatcher:
        """An independent matcher that holds back the same."""
        return copy(self)

    def flush(self) -> str:
        """The text ended otherwise: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, seen: int) -> tuple[int, str] | None:
        """(end, stop) of the match that completes first, beyond the `seen` letters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, seen - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), stop)
        return best

    def _unfinished(self, text: str) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = min(len(text), len(self._stops[0]) - 1)
        for length in range(longest, 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
