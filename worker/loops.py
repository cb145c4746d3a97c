"""Which event loop a worker runs on.

Invariant: uvloop is used where it is installed, and missed nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Makes loops, for asyncio.Runner; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
