"""What a client made for an address keeps hold of."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import ConnectionError

from tokenfleet.producer.address import parse_address
from tokenfleet.producer.dialing import dial, hang_up
from tokenfleet.producer.mended import Door

MASTER = {"ip": "127.0.0.1", "port": 1, "is_master": True, "is_sdown": False, "is_odown": False}


async def test_no_sentinel_is_lost_when_calls_ask_for_the_master_at_once(
    monkeypatch: Any,
) -> None:
    client = dial(
        parse_address("redis+sentinel://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3/main"), 1.0, Door()
    )
    asked = client.connection_pool.sentinel_manager
    every = list(asked.sentinels)
    closed: list[Any] = []

    def behaves(sentinel: Any, *, answers: bool) -> None:
        async def masters() -> dict[str, Any]:
            await asyncio.sleep(0)
            if not answers:
                raise ConnectionError(f"{sentinel} is down")
            return {"main": {**MASTER, "num-other-sentinels": 2}}

        async def close() -> None:
            closed.append(sentinel)

        monkeypatch.setattr(sentinel, "sentinel_masters", masters)
        monkeypatch.setattr(sentinel, "aclose", close)

    for number, sentinel in enumerate(every):
        behaves(sentinel, answers=number == 1)
    await asyncio.gather(*(asked.discover_master("main") for _ in range(2)))
    behaves(every[0], answers=True)
    behaves(every[1], answers=False)
    assert await asked.discover_master("main") == ("127.0.0.1", 1)
    await hang_up(client)
    assert set(closed) == set(every)
