"""The Redis users that `tokenfleet acl` makes can run a watched fleet, and do nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from tokenfleet.producer import AsyncClient, SamplingParams
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.errors import BrokerUnsupported
from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.rights import gateway_rules
from tokenfleet.worker.demo.worker_process import WorkerProcess


async def test_a_worker_with_the_least_rights_serves_and_sees_its_queue(
    tmp_path: Path, byte_tokenizer: Path, run: Any
) -> None:
    with EmbeddedServer() as server:
        admin = Redis.from_url(server.url)
        urls = {}
        for role in ("worker", "producer"):
            said = run("acl", role).stdout.replace(">PASSWORD", ">secret").split()
            await admin.execute_command(*said)
            urls[role] = server.url.replace("redis://", f"redis://{role}:secret@")
        settings = {
            "redis_url": urls["worker"],
            "model": byte_tokenizer,
            "model_name": "echo",
            "simulated_step_ms": 2,
        }
        worker = WorkerProcess("w1", settings, tmp_path / "worker.log")
        await worker.start()
        await worker.ready()
        async with AsyncClient(urls["producer"]) as client:
            job = await client.submit(
                model="echo", prompt="hi", sampling=SamplingParams(max_tokens=6)
            )
            text = "".join([event.text async for event in job.stream()])
            assert text == (await job.result(timeout_s=240)).text == "hihihi"
            later = await client.submit(model="echo", prompt="hi", delay_s=3600)
            await later.cancel()
        while not await worker.metric("tokenfleet_ready"):  # noqa: ASYNC110  # a scrape has no event
            await asyncio.sleep(0.05)
        assert "NOPERM" not in worker.last_lines(1000)
        assert await worker.stop(240.0) == 0
        stranger = Redis.from_url(urls["worker"])
        with pytest.raises(NoPermissionError):
            await stranger.set("other", "x")
        with pytest.raises(NoPermissionError):
            await stranger.flushall()
        await stranger.aclose()
        await admin.aclose()


async def test_a_gateway_with_its_rights_submits_and_sees_all_of_the_fleet(valkey_lab: Any) -> None:
    lab = valkey_lab
    admin = Redis.from_url(lab.server.url)
    rules = gateway_rules(lab.namespace)
    await admin.execute_command("ACL", "SETUSER", "web", "on", ">secret", *rules)
    queue = await lab.queue()
    await queue.heartbeat({"slots": 2, "running": 1}, ttl_s=60.0)
    url = lab.server.url.replace("redis://", "redis://web:secret@")
    async with AsyncClient(url, namespace=lab.namespace) as client:
        job = await client.submit(model="m", prompt="hi")
        await queue.claim(1)
        reader = FleetReader(client.link.connection)
        status = await reader.status()
        assert (status.running, status.slots, status.dead) == (1, 2, 0)
        assert [one.job_id for one in await reader.running()] == [job.id]
        assert await reader.models() == {"m": 1}
        with pytest.raises(BrokerUnsupported, match="tokenfleet acl"):
            await client.link.connection.execute("CONFIG", "GET", "save")
    await admin.execute_command("ACL", "DELUSER", "web")
    await admin.aclose()


@pytest.fixture
async def producer_urls(run: Any) -> AsyncIterator[tuple[str, str]]:
    """Ways to a server that lets nobody in without a password: without one, and as a producer."""
    with EmbeddedServer() as server:
        admin = Redis.from_url(server.url)
        said = run("acl", "producer").stdout.replace(">PASSWORD", ">secret").split()
        await admin.execute_command(*said)
        await admin.execute_command("CONFIG", "SET", "requirepass", "secret")
        await admin.aclose()
        yield server.url, server.url.replace("redis://", "redis://producer:secret@")


@pytest.mark.parametrize("words", ["queue list", "dead list", "queue pause m"])
async def test_who_may_not_do_it_is_told_how_to_get_the_rights(
    producer_urls: tuple[str, str], run: Any, words: str
) -> None:
    done = await asyncio.to_thread(run, *words.split(), "--redis-url", producer_urls[1])
    assert done.returncode == 3
    assert "`tokenfleet acl` prints the rights" in done.stderr
    assert "Traceback" not in done.stderr


async def test_who_gave_no_password_is_told_where_it_belongs(
    producer_urls: tuple[str, str], run: Any
) -> None:
    done = await asyncio.to_thread(run, "queue", "list", "--redis-url", producer_urls[0])
    assert done.returncode == 3
    assert "Redis asks for a user and a password" in done.stderr
