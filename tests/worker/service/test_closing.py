"""A worker that ends lets go of all it had opened, however it is ended."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis


@pytest.mark.parametrize("ended_by", ["drained", "cancelled"])
@pytest.mark.parametrize("cancels", [0, 1, 2])
async def test_a_worker_that_is_cancelled_while_it_closes_closes_its_connections(
    own_fleet, until, ended_by: str, cancels: int
) -> None:
    fleet = own_fleet
    worker = fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    stops, may_stop, stop = asyncio.Event(), asyncio.Event(), fleet.engine.stop

    async def slow_stop() -> None:
        stops.set()
        await may_stop.wait()
        await stop()

    fleet.engine.stop = slow_stop
    fleet.engine.say(job, "x", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    worker.drain() if ended_by == "drained" else fleet.runs[-1].cancel()
    await stops.wait()
    for _ in range(cancels):
        fleet.runs[-1].cancel()
        await asyncio.sleep(0)
    may_stop.set()
    (end,) = await asyncio.gather(*fleet.runs, return_exceptions=True)
    if ended_by == "cancelled" or cancels:
        assert isinstance(end, asyncio.CancelledError)
    else:
        assert end == 0
    await until(lambda: _alone(fleet))


async def test_a_worker_closes_its_connections_although_its_engine_cannot_be_stopped(
    own_fleet, until
) -> None:
    fleet = own_fleet
    worker = fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    stop = fleet.engine.stop

    async def failing_stop() -> None:
        await stop()
        raise OSError("no such process")

    fleet.engine.stop = failing_stop
    fleet.engine.say(job, "x", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    worker.drain()
    with pytest.raises(OSError, match="no such process"):
        await fleet.runs[-1]
    await until(lambda: _alone(fleet))


async def _alone(fleet) -> bool:
    """Whether nobody is connected any more, once the test itself is not."""
    await fleet.connection.aclose()
    async with Redis.from_url(fleet.server.url) as asking:
        own = await asking.client_id()
        return [int(client["id"]) for client in await asking.client_list()] == [own]
