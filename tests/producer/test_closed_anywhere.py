"""Closed or cancelled at whichever moment, nothing is left connected.

Each test does the same again and again and stops it one turn of the event loop later each time, so
that every await of ours and of redis-py is met.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.client import AsyncClient
from tokenfleet.worker.queue import JobQueue

TURNS = 40
"""More than any of these calls takes, but for those that wait for a server's answer."""

Calls = list[Coroutine[Any, Any, Any]]


def sockets() -> set[str]:
    """Open ones of this process."""
    found = set()
    for fd in Path("/proc/self/fd").glob("*"):
        try:
            found.add(str(fd.readlink()))
        except OSError:  # the folder's own
            continue
    return {name for name in found if name.startswith("socket:")}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def submits(client: AsyncClient, _job_id: str) -> Calls:
    return [client.submit(model="m", prompt="x") for _ in range(5)]


def looks(client: AsyncClient, job_id: str) -> Calls:
    return [client.job(job_id).status() for _ in range(5)]


def reads(client: AsyncClient, job_id: str) -> Calls:
    async def read() -> None:
        async for _ in client.job(job_id).stream():
            pass

    return [read() for _ in range(3)]


def batches(client: AsyncClient, _job_id: str) -> Calls:
    return [client.submit_many([{"model": "m", "prompt": "x"}] * 300)]


@pytest.mark.parametrize("calls", [submits, looks, reads, batches])
async def test_calls_under_way_as_their_client_is_closed_leave_nothing_open(bare_lab, calls):
    async def once(after: int, client: AsyncClient, job_id: str) -> None:
        tasks = [asyncio.ensure_future(call) for call in calls(client, job_id)]
        await turns(after)
        await client.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)

    await _at_every_turn(bare_lab, once)


@pytest.mark.parametrize("calls", [submits, reads])
async def test_calls_that_are_cancelled_leave_nothing_open_beyond_their_client(bare_lab, calls):
    async def once(after: int, client: AsyncClient, job_id: str) -> None:
        tasks = [asyncio.ensure_future(call) for call in calls(client, job_id)]
        await turns(after)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()

    await _at_every_turn(bare_lab, once)


async def test_a_close_that_is_cancelled_has_closed_all_the_same(bare_lab):
    async def once(after: int, client: AsyncClient, job_id: str) -> None:
        calls = [*submits(client, job_id), *reads(client, job_id)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await client.job(job_id).status()
        closing = asyncio.ensure_future(client.aclose())
        await turns(after + 1)
        closing.cancel()
        await asyncio.gather(closing, *tasks, return_exceptions=True)

    await _at_every_turn(bare_lab, once, up_to=10)


async def test_a_queue_closed_in_the_middle_of_its_calls_leaves_nothing_open(bare_lab):
    async def once(after: int, _client: AsyncClient, _job_id: str) -> None:
        queue = JobQueue(
            bare_lab.server.url, namespace=f"q{after}", model_name="m", worker_id="w", partitions=4
        )

        async def work() -> None:
            await queue.ensure()
            while not await queue.claim(3):
                await queue.wait(1.0)

        working = asyncio.ensure_future(work())
        await turns(2 * after)
        await queue.aclose()
        await asyncio.gather(working, return_exceptions=True)

    await _at_every_turn(bare_lab, once)


async def _at_every_turn(
    lab: Any, once: Callable[[int, AsyncClient, str], Awaitable[None]], up_to: int = TURNS
) -> None:
    async def connected() -> set[str]:
        return {one["id"] for one in await lab.raw.client_list()}

    job_id = await lab.submit()
    own = await connected()
    before = sockets()
    for number in range(1, up_to):
        await once(number, AsyncClient(lab.server.url, namespace=lab.namespace), job_id)
        await turns(3)  # what was cut is closed in the turn after
        assert sockets() <= before, f"left open when stopped after {number} turns of the loop"

    async def alone() -> bool:
        return await connected() == own

    await lab.until(alone)
