"""Whose turn it is, where more calls are made at once than a pool has connections.

Invariant: of two calls that wait, the one that came first goes first; a turn given to a call that
was cancelled meanwhile is the next one's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from redis.exceptions import ConnectionError, TimeoutError


class Turns:
    """So many calls go at once, and the others wait in line.

    Args:
        most: calls at once.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._line: deque[asyncio.Future[None]] = deque()
        self._answered = 0.0
        """When a call last got its answer, by the loop's clock."""

    def turn(self, patience_s: float) -> AbstractAsyncContextManager[None]:
        """Within the block it is this call's turn.

        A line that moves is waited in for as long as it takes. Raises TimeoutError when no call has
        been answered for `patience_s`: the server is away then, and not busy.
        """
        return _Turn(self, patience_s)

    def close(self, why: str) -> None:
        """End the waiting: each call raises ConnectionError."""
        for waiter in self._line:
            if not waiter.done():
                waiter.set_exception(ConnectionError(why))

    async def begin(self, patience_s: float) -> None:
        """Return when it is this call's turn; see `turn`."""
        if self._free > 0:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        waiter, began = loop.create_future(), loop.time()
        self._line.append(waiter)
        try:
            while not waiter.done():
                left = max(began, self._answered) + patience_s - loop.time()
                if left <= 0:
                    raise TimeoutError(f"no call of many was answered for {patience_s:g} s")
                await asyncio.wait((waiter,), timeout=left)
            waiter.result()
        except BaseException:
            if not waiter.cancel() and waiter.exception() is None:
                self._pass_on()
            raise

    def end(self, *, answered: bool) -> None:
        """It is the next call's turn."""
        if answered:
            self._answered = asyncio.get_running_loop().time()
        self._pass_on()

    def _pass_on(self) -> None:
        while self._line:
            waiter = self._line.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1


class _Turn(AbstractAsyncContextManager[None]):
    """One call's. A generator in its place costs twice as much, and each flush has a turn."""

    __slots__ = ("_patience_s", "_turns")

    def __init__(self, turns: Turns, patience_s: float) -> None:
        self._turns = turns
        self._patience_s = patience_s

    async def __aenter__(self) -> None:
        await self._turns.begin(self._patience_s)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._turns.end(answered=kind is None)
