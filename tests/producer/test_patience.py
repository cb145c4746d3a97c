"""One timer for many waits."""

from __future__ import annotations

import asyncio

from tokenfleet.producer.patience import Patience


async def test_a_short_wait_behind_a_long_one_is_short() -> None:
    over = asyncio.Event()
    patience = Patience(over.set)
    patience.begin(3600.0)
    patience.begin(0.01)
    await over.wait()


async def test_what_begins_anew_is_not_over_with_what_was_before() -> None:
    calls: list[float] = []
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def note() -> None:
        calls.append(loop.time())
        over.set()

    patience = Patience(note)
    began = loop.time()
    patience.begin(0.01)
    patience.begin(0.1)
    await over.wait()
    assert len(calls) == 1
    assert calls[0] >= began + 0.1


async def test_what_is_ended_calls_no_more() -> None:
    over, later = asyncio.Event(), asyncio.Event()
    patience = Patience(over.set)
    patience.begin(0.0)
    patience.end()
    asyncio.get_running_loop().call_later(0.02, later.set)
    await later.wait()
    assert not over.is_set()
