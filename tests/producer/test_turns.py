"""More calls at once than there are connections: each has its turn, none is lost or doubled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio as aio
from redis.exceptions import ConnectionError, TimeoutError

from tokenfleet.producer.blocking import Client
from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.connection import MOST_CALLS
from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.protocol import JobRequest
from tokenfleet.producer.turns import Turns

MANY = 300
JOB = {"model": "m", "prompt": "x"}


@pytest.fixture
def refusals(monkeypatch):
    """How often redis-py's pool said that it has no connection."""
    seen: list[Any] = []
    given = aio.ConnectionPool.get_available_connection

    def get(pool: Any) -> Any:
        try:
            return given(pool)
        except ConnectionError as error:
            seen.append(error)
            raise

    monkeypatch.setattr(aio.ConnectionPool, "get_available_connection", get)
    return seen


async def test_many_calls_at_once_wait_for_their_turn_and_are_made_once(bare_lab, refusals):
    lab = bare_lab
    async with AsyncClient(lab.server.url, namespace=lab.namespace) as client:
        jobs = await asyncio.gather(*(client.submit(**JOB) for _ in range(MANY)))
        assert len({job.id for job in jobs}) == MANY == await lab.entries()
        assert len(await lab.raw.client_list()) <= MOST_CALLS + 1
    assert refusals == []


def test_many_calls_at_once_of_the_blocking_client_wait_too(valkey, refusals):
    with Client(valkey.url, namespace="turns") as client:

        async def at_once() -> list[Any]:
            asked = client._client
            return await asyncio.gather(*(asked.submit(**JOB) for _ in range(MANY)))

        assert len({job.id for job in client.run(at_once())}) == MANY
    assert refusals == []


async def test_of_calls_that_are_cancelled_or_time_out_in_line_none_is_lost_or_doubled(bare_lab):
    lab = bare_lab
    async with AsyncClient(lab.server.url, namespace=lab.namespace) as client:
        calls = [asyncio.ensure_future(client.submit(**JOB)) for _ in range(MANY)]
        for number in range(0, MANY, 3):
            await asyncio.sleep(0)
            calls[number].cancel()
        timed = [asyncio.wait_for(client.submit(**JOB), 0.001) for _ in range(9)]
        done = await asyncio.gather(*calls, *timed, return_exceptions=True)
        accepted = {one.id for one in done if not isinstance(one, BaseException)}
        assert len(accepted) >= MANY - MANY // 3
        waiting = await lab.raw.xrange(lab.keys.queue("m", "default"))
        entries = [fields[b"j"].decode() for _, fields in waiting]
        assert accepted <= set(entries)
        assert len(set(entries)) == len(entries)
        again = await asyncio.gather(*(client.submit(**JOB) for _ in range(MANY)))
        assert len({job.id for job in again}) == MANY, "no turn was lost"


async def test_a_url_with_few_connections_is_served_with_few(bare_lab, refusals):
    url = f"{bare_lab.server.url}?max_connections=3"
    async with AsyncClient(url, namespace="few") as client:
        jobs = await asyncio.gather(*(client.submit(**JOB) for _ in range(50)))
        assert len({job.id for job in jobs}) == 50
    assert refusals == []


async def test_calls_in_line_end_when_their_client_is_closed(bare_lab):
    client = AsyncClient(bare_lab.server.url, namespace="closing")
    await client.connect()
    calls = [asyncio.ensure_future(client.submit(**JOB)) for _ in range(MANY)]
    await asyncio.sleep(0)
    await client.aclose()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(one, BrokerUnavailable) for one in found)


async def test_who_came_first_goes_first_and_a_cancelled_call_is_passed_over():
    turns, went = Turns(1), list[int]()

    async def call(number: int) -> None:
        async with turns.turn(60.0):
            went.append(number)
            await asyncio.sleep(0)

    calls = [asyncio.ensure_future(call(number)) for number in range(6)]
    await asyncio.sleep(0)
    calls[2].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert went == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("after", range(6))
async def test_a_call_cancelled_as_its_turn_comes_passes_it_on(after):
    turns, first_may_end = Turns(1), asyncio.Event()

    async def first() -> None:
        async with turns.turn(60.0):
            await first_may_end.wait()

    async def waits() -> None:
        async with turns.turn(60.0):
            pass

    calls = [asyncio.ensure_future(first()), *(asyncio.ensure_future(waits()) for _ in range(2))]
    await asyncio.sleep(0)
    first_may_end.set()
    for _ in range(after):
        await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert calls[2].exception() is None


async def test_a_line_in_which_nobody_is_answered_is_waited_in_for_no_longer_than_told():
    turns = Turns(1)
    async with turns.turn(60.0):
        with pytest.raises(TimeoutError, match="no call of many was answered"):
            async with turns.turn(0.01):
                raise AssertionError("it is not its turn")
    async with turns.turn(0.01):
        return


async def test_a_forked_child_waits_for_none_of_its_parents_turns(bare_lab):
    connection, reply = bare_lab.connection, asyncio.Event()
    await connection.execute("PING")

    async def parents() -> None:
        async with connection._turns_at("").turn(60.0):
            await reply.wait()

    calls = [asyncio.ensure_future(parents()) for _ in range(MOST_CALLS)]
    await asyncio.sleep(0)
    connection._pid = -1  # what a child finds: it is not the process that made the client
    parents_client = connection._client
    assert await connection.execute("PING")
    reply.set()
    await asyncio.gather(*calls)
    await parents_client.aclose()


async def test_once_a_batch_of_many_has_failed_none_of_the_others_is_sent(bare_lab, monkeypatch):
    lab, run, begun = bare_lab, bare_lab.connection.run, 0
    others_begin = asyncio.Event()

    async def fails_once(*args: Any, **more: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise BrokerUnavailable("the first one")
        await others_begin.wait()
        return await run(*args, **more)

    monkeypatch.setattr(lab.connection, "run", fails_once)
    request = JobRequest(model="m", prompt="x")
    drafts = [lab.submission.draft(request) for _ in range(1000)]
    with pytest.raises(BrokerUnavailable):
        await lab.submission.send(drafts)
    others_begin.set()
    assert len(asyncio.all_tasks()) == 1
    assert await lab.entries() == 0
