"""One connection kept for a call that is made many times a second.

redis-py's client takes a connection out of its pool for each command, looks whether it is still
good, and keeps count of what it does. Of a worker's flush that is as much as sending it.

Invariant: a reply is read by the call that it answers. redis-py closes a connection on which a call
was broken off, and the next call opens it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Line:
    """Such a connection, opened by its first call. It repeats nothing.

    Args:
        make: a redis-py connection, not yet connected.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._wire: Any = None
        self.busy = False
        """Whether a call is under way: another one has to go another way."""

    async def execute_command(self, *args: Any, **_options: Any) -> Any:
        """Send one command and return its reply; raises what redis-py's client raises."""
        assert not self.busy
        self.busy = True
        try:
            if self._wire is None:
                self._wire = self._make()
            await self._wire.send_command(*args)
            return await self._wire.read_response()
        finally:
            self.busy = False

    async def hang_up(self) -> None:
        """Close the connection; the next call opens another."""
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.disconnect()
