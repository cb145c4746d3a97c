"""The connection kept for calls that are made many times a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError, NoScriptError, ResponseError, TimeoutError

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.line import Line
from tokenfleet.producer.patience import Patience
from tokenfleet.producer.scripts import Script
from tokenfleet.worker.claims import flat


@asynccontextmanager
async def line_to(lab: Any, change: Callable[[Any], None] = lambda _wire: None) -> AsyncIterator:
    """A line that waits for a reply as long as the test takes, unless `change` says otherwise."""

    def make() -> Any:
        wire = lab.connection.line_to(0)
        wire.socket_timeout = 600.0
        change(wire)
        return wire

    line = Line(make)
    try:
        yield line
    finally:
        await line.hang_up()


async def test_all_calls_go_over_one_connection_refused_ones_too(valkey_lab):
    async with line_to(valkey_lab) as line:
        first = await line.execute_command("CLIENT ID")
        with pytest.raises(NoScriptError):
            await line.execute_command("EVALSHA", "0" * 40, 0)
        with pytest.raises(ResponseError, match="wrong number of arguments"):
            await line.execute_command("GET")
        assert await line.execute_command("CLIENT ID") == first


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 3_000_000])
async def test_arguments_and_replies_of_every_size_come_whole(valkey_lab, size):
    async with line_to(valkey_lab) as line:
        for value in (b"\r\n" * (size // 2), b"x" * size):
            assert await line.execute_command("ECHO", value) == value


async def test_a_call_broken_off_leaves_its_reply_to_nobody(valkey_lab):
    lab = valkey_lab
    async with line_to(lab) as line:
        before = await line.execute_command("CLIENT ID")
        nothing = f"{lab.namespace}:nothing"
        waiting = asyncio.create_task(line.execute_command("BLPOP", nothing, 0))
        await lab.until(lambda: lab.blocked(before))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await lab.raw.rpush(nothing, "late")
        assert await line.execute_command("ECHO", "mine") == b"mine"
        assert await line.execute_command("CLIENT ID") != before


async def test_calls_made_at_once_share_the_connection_and_each_has_its_own_reply(valkey_lab):
    async with line_to(valkey_lab) as line:
        said = await asyncio.gather(
            *(line.execute_command("ECHO", str(n)) for n in range(40)),
            line.execute_command("CLIENT ID"),
            line.execute_command("GET"),
            line.execute_command("ECHO", b"x" * 300_000),
            return_exceptions=True,
        )
        assert said[:40] == [str(n).encode() for n in range(40)]
        assert said[40] == await line.execute_command("CLIENT ID")
        assert isinstance(said[41], ResponseError)
        assert said[42] == b"x" * 300_000


async def test_a_call_broken_off_before_others_takes_no_reply_of_theirs(valkey_lab):
    lab = valkey_lab
    async with line_to(lab) as line:
        number = await line.execute_command("CLIENT ID")
        later = f"{lab.namespace}:later"
        broken_off = asyncio.create_task(line.execute_command("BLPOP", later, 0))
        await lab.until(lambda: lab.blocked(number))
        others = [asyncio.create_task(line.execute_command("ECHO", f"{n}")) for n in range(3)]
        await asyncio.sleep(0)
        broken_off.cancel()
        with pytest.raises(asyncio.CancelledError):
            await broken_off
        await lab.raw.rpush(later, "late")
        assert await asyncio.gather(*others) == [b"0", b"1", b"2"]
        assert await line.execute_command("CLIENT ID") == number


async def test_a_reply_that_is_late_fails_those_behind_it_and_however_many_calls_come(valkey_lab):
    """A line on which calls are made all the time notices a server that says nothing."""
    wires: list[Any] = []
    async with line_to(valkey_lab, wires.append) as line:
        number = await line.execute_command("CLIENT ID")
        wires[0].socket_timeout = 0.2
        calls = [
            asyncio.create_task(line.execute_command("BLPOP", f"{valkey_lab.namespace}:nothing", 0))
        ]
        while not calls[0].done():
            calls.append(asyncio.create_task(line.execute_command("PING")))
            await asyncio.sleep(0.01)
        assert isinstance(calls[0].exception(), TimeoutError)
        behind = await asyncio.gather(*calls[1:], return_exceptions=True)
        assert any(isinstance(one, TimeoutError) for one in behind)
        assert all(isinstance(one, TimeoutError) or one == b"PONG" for one in behind)
        assert await line.execute_command("CLIENT ID") != number


async def test_a_reply_that_is_not_there_in_time_is_a_timeout_and_the_next_call_goes_on(valkey_lab):
    wires: list[Any] = []
    async with line_to(valkey_lab, wires.append) as line:
        assert await line.execute_command("ECHO", "a") == b"a"
        wires[0].socket_timeout = 0.01
        with pytest.raises(TimeoutError):
            await line.execute_command("BLPOP", f"{valkey_lab.namespace}:nothing", 0)
        assert await line.execute_command("ECHO", "b") == b"b"


async def test_a_line_on_which_nobody_waits_stays_open_however_long(valkey_lab, monkeypatch):
    times_up: list[Callable[[], None]] = []

    class Noted(Patience):
        def __init__(self, over: Callable[[], None]) -> None:
            super().__init__(over)
            times_up.append(over)

    monkeypatch.setattr("tokenfleet.producer.line.Patience", Noted)
    async with line_to(valkey_lab) as line:
        number = await line.execute_command("CLIENT ID")
        times_up[0]()
        assert await line.execute_command("CLIENT ID") == number


async def test_a_connection_killed_under_a_call_raises_and_the_next_call_opens_another(valkey_lab):
    lab = valkey_lab
    async with line_to(lab) as line:
        number = await line.execute_command("CLIENT ID")
        nothing = f"{lab.namespace}:nothing"
        waiting = asyncio.create_task(line.execute_command("BLPOP", nothing, 0))
        await lab.until(lambda: lab.blocked(number))
        await lab.raw.client_kill_filter(_id=number)
        with pytest.raises(ConnectionError):
            await waiting
        assert await line.execute_command("CLIENT ID") != number


async def test_a_line_hung_up_while_it_connects_leaves_nothing_open(valkey_lab):
    made: list[Any] = []
    began = asyncio.Event()

    def begin(wire: Any) -> None:
        made.append(wire)
        began.set()

    async with line_to(valkey_lab, begin) as line:
        calling = asyncio.create_task(line.execute_command("PING"))
        await began.wait()
        await line.hang_up()
        with pytest.raises(ConnectionError, match="closed while it was made"):
            await calling
        assert not made[0].is_connected
        assert await line.execute_command("PING") == b"PONG"


async def test_a_call_under_way_as_its_client_is_closed_opens_nothing_again(valkey_lab):
    lab = valkey_lab
    connection = Connection(lab.server.url, namespace=lab.namespace)
    connection.client.connection_pool.connection_kwargs["socket_timeout"] = 600.0
    number = await connection.execute("CLIENT", "ID")
    waiting = asyncio.create_task(connection.execute("BLPOP", f"{lab.namespace}:nothing", 0))
    await lab.until(lambda: lab.blocked(number))
    await connection.aclose()
    with pytest.raises(BrokerUnavailable, match="closed during a call"):
        await waiting
    assert connection._client is None


async def test_what_the_server_pushes_is_no_reply(valkey_lab):
    def modern(wire: Any) -> None:
        wire.protocol = 3

    watched = f"{valkey_lab.namespace}:watched"
    async with line_to(valkey_lab, modern) as line:
        await line.execute_command("CLIENT", "TRACKING", "ON", "BCAST")
        for value in ("a", "b", "c"):
            await valkey_lab.raw.set(watched, value)
            assert await line.execute_command("GET", watched) == value.encode()


async def test_scripts_that_run_often_have_a_connection_of_their_own_and_survive_its_loss(
    bare_lab,
):
    lab, whoami = bare_lab, Script("whoami", "return redis.call('PING')['ok'] .. ARGV[3]")
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    run = queue.connection.run
    said = await asyncio.gather(
        *(run(whoami, 0, [], [n], patience_s=1.0, often=True) for n in range(9))
    )
    assert said == [f"PONG{n}".encode() for n in range(9)]
    for offset in range(3):
        await queue.emit([lab.emission(job, offset, lab.token(offset))])
        await lab.raw.client_kill_filter(_type="normal", skipme=True)
    assert [event.offset for event in await lab.log(job_id)] == [0, 1, 2]
    assert await queue.finish(job, flat([]), None, state="cancelled")
