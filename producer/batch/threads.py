"""Blocking work in a thread, without leaving it behind.

Invariant: when the call has returned or raised, also by cancellation, the thread's work is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


async def in_thread(
    call: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Found:
    """The call's result. A cancellation waits for the call's end: it may hold a file."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
