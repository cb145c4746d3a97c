"""When an engine began to work, and when it had the first tokens of a request: a hook of benches.

A line of JSON for each step that made first tokens: since when the engine has had work without a
pause, when the tokens were there, and whose they are. Times are of the system's monotonic clock,
which all processes of a machine share.

Invariant: without a file nothing is noted, and what is noted is there before the tokens leave.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

from tokenfleet.engine.request import CoreEvent


class StepLog:
    """Writes to the end of a file; None: to none."""

    def __init__(self, path: str | None) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(path, flags, 0o600) if path else None
        self._since: float | None = None
        self._begun: set[str] = set()

    def idle(self) -> None:
        """There is nothing to compute."""
        self._since = None

    def begin(self) -> None:
        """A step begins."""
        if self._since is None:
            self._since = time.monotonic()

    def made(self, events: Iterable[CoreEvent]) -> None:
        """What the step made."""
        if self._file is None:
            return
        now = time.monotonic()
        first = [event.id for event in events if event.token_ids and event.id not in self._begun]
        if first:
            self._begun.update(first)
            line = {"working_since": self._since, "made": now, "ids": first}
            os.write(self._file, json.dumps(line).encode() + b"\n")
        self._begun.difference_update(event.id for event in events if event.finish_reason)
