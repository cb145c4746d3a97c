"""A server that is there and takes nothing for now: the call may be made again."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [("min-replicas-to-write", 1, "NOREPLICAS"), ("maxmemory", 1, "out of memory")],
)
async def test_a_server_that_takes_no_writes_is_unavailable(bare_lab, setting, value, said):
    client = bare_lab.client(connect_timeout_s=0.5)
    job = await client.submit(model="m", prompt="x")
    await bare_lab.raw.config_set(setting, value)
    with pytest.raises(BrokerUnavailable, match=said) as found:
        await client.submit(model="m", prompt="x")
    assert found.value.retryable
    await bare_lab.raw.config_set(setting, 0)
    assert await job.cancel() == "cancelled"


async def test_a_server_that_takes_no_writes_for_a_moment_is_waited_for(bare_lab, until):
    """As one that is away is: for connect_timeout_s."""
    client = bare_lab.client(connect_timeout_s=240.0)
    await bare_lab.raw.config_set("min-replicas-to-write", 1)
    submitting = asyncio.ensure_future(client.submit(model="m", prompt="x"))

    async def refused() -> bool:
        return "errorstat_NOREPLICAS" in await bare_lab.raw.info("errorstats")

    await until(refused)
    await bare_lab.raw.config_set("min-replicas-to-write", 0)
    assert (await (await submitting).status()).state == "waiting"


async def test_a_claim_from_a_server_that_was_demoted_is_told_as_such(bare_lab):
    """What a script meets on its way keeps its code: by it the new master is looked for."""
    queue = await bare_lab.queue()
    await bare_lab.submit()
    await bare_lab.raw.replicaof("127.0.0.1", "1")
    with pytest.raises(BrokerUnavailable, match="read only replica"):
        await queue.claim(1)


@pytest.mark.parametrize(
    ("place", "said"),
    [("{host}/99", "DB index is out of range"), ("{sentinel}/mymaster", "SENTINEL")],
)
async def test_an_address_that_leads_to_another_kind_of_server_is_named(bare_lab, place, said):
    host = bare_lab.server.url.rpartition("/")[0]
    url = place.format(host=host, sentinel=host.replace("redis://", "redis+sentinel://"))
    connection = Connection(url, namespace="n")
    with pytest.raises(BrokerUnsupported, match=said):
        await connection.ready()
    with pytest.raises(BrokerUnsupported, match="is the address right"):
        await connection.execute("EXISTS", "x")
    await connection.aclose()


@pytest.mark.parametrize(
    "words",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"E\0\0\0\x10SFATAL\0", b"+hello\r\n" * 9, b"*0\r\n" * 9],
    ids=["http", "postgres", "redis's own signs", "an empty list"],
)
async def test_what_answers_and_is_no_redis_is_named(words):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(10_000):
                writer.write(words)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = Connection(f"redis://127.0.0.1:{port}", namespace="n")
        with pytest.raises(BrokerUnsupported, match="no Redis"):
            await connection.ready()
        await connection.aclose()


async def test_a_server_without_tls_is_doubted_to_speak_it(bare_lab):
    url = bare_lab.server.url.replace("redis://", "rediss://")
    connection = Connection(url, namespace="n", connect_timeout_s=1.5)
    with pytest.raises(BrokerUnavailable, match="does it speak TLS there"):
        await connection.ready()
    await connection.aclose()
