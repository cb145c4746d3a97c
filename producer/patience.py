"""One timer for many waits, one after the other.

A stream waits for every message and a kept connection for every reply: to make and cancel a timer
each time costs more than to decode what comes.

Invariant: no wait lasts longer than it was begun for, whatever the one before was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Patience:
    """Calls `over` once nothing has begun anew for a while."""

    def __init__(self, over: Callable[[], None]) -> None:
        self._over = over
        self._until = 0.0
        """By the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        """Goes off at `_until` or before, and looks at the time."""

    def begin(self, timeout_s: float) -> None:
        """Call in `timeout_s`, unless this is called again before."""
        loop = asyncio.get_running_loop()
        self._until = loop.time() + timeout_s
        if self._timer is not None and self._timer.when() > self._until:
            self.end()
        if self._timer is None:
            self._timer = loop.call_at(self._until, self._look)

    def end(self) -> None:
        """Call no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if loop.time() >= self._until:
            self._over()
        else:
            self._timer = loop.call_at(self._until, self._look)
