"""Says so when a command waits for jobs that no live worker takes.

Invariant: it only speaks; what is waited for, and for how long, does not depend on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tokenfleet.worker.commands import base

if TYPE_CHECKING:
    from tokenfleet.producer.client import AsyncClient

LOOK_AFTER_S = 1.0
"""A job that is served has mostly begun by then, and nobody need look."""


@asynccontextmanager
async def said_if_unserved(
    client: AsyncClient, model: str | None, *, after_s: float = LOOK_AFTER_S
) -> AsyncIterator[None]:
    """While this is open, a note is made where no live worker serves the model."""
    looking = asyncio.create_task(_look(client, model, after_s))
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def _look(client: AsyncClient, model: str | None, after_s: float) -> None:
    from tokenfleet.producer.errors import TokenfleetError
    from tokenfleet.producer.fleet import FleetReader

    if model is None:
        return
    await asyncio.sleep(after_s)
    try:
        served = await FleetReader(client.link.connection).served()
    except TokenfleetError:  # Redis is away, or this user may not see workers: others say so
        return
    if model not in served:
        others = f" (served: {', '.join(sorted(served))})" if served else ""
        base.note(
            f"no live worker serves {model!r}{others}: jobs wait for one; see: tokenfleet doctor"
        )
