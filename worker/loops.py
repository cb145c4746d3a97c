"""Which event loop a worker runs on, and how its last words are said there.

Invariant: uvloop is used where it is installed, and missed nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes loops, for asyncio.Runner; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await what no cancellation of its caller may cut short; the caller is cancelled after it."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
