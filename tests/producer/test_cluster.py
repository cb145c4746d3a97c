"""The whole life of jobs on three cluster masters: every script stays in one slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio as aio
from redis.exceptions import ClusterDownError

from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.hub import Hub
from tokenfleet.producer.keys import new_job_id, partition_of
from tokenfleet.producer.protocol import Choice, Event, JobRequest, JobResult
from tokenfleet.producer.submission import Submission
from tokenfleet.producer.subscription import REREAD
from tokenfleet.worker.claims import flat
from tokenfleet.worker.queue import Emission, JobQueue

SLOTS = 16384
RESULT = JobResult(choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="length"),))


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedServer]]:
    """Three servers that know each other, with a third of the slots each."""
    with ExitStack() as stack:
        servers = []
        for number in range(3):
            folder: Path = tmp_path_factory.mktemp(f"master{number}")
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000"]
            options += ["--dir", str(folder)]
            server = EmbeddedServer(options=options, port_options=["--cluster-port"])
            servers.append(stack.enter_context(server))
        _join(servers)
        yield servers


@pytest.fixture
async def cluster(masters: list[EmbeddedServer]) -> AsyncIterator[aio.RedisCluster]:
    client = aio.RedisCluster(host="127.0.0.1", port=masters[0].port)
    await client.initialize()
    yield client
    await client.aclose()


@pytest.fixture
async def queue_of(cluster: aio.RedisCluster) -> AsyncIterator[Callable[..., JobQueue]]:
    """queue_of(namespace, worker_id): closed with the test, however that ends."""
    async with AsyncExitStack() as stack:

        def make(namespace: str, worker_id: str = "w1") -> JobQueue:
            queue = JobQueue(
                cluster, namespace=namespace, model_name="m", worker_id=worker_id, lease_s=30.0
            )
            stack.push_async_callback(queue.aclose)
            return queue

        yield make


async def test_the_life_of_many_jobs_over_all_partitions(cluster, queue_of):
    async with AsyncClient(cluster, namespace="life") as client:
        queue = queue_of("life")
        other = queue_of("life", "w2")
        await queue.ensure()
        await queue.heartbeat({"slots": 64}, ttl_s=3600.0)
        jobs = await client.submit_many([{"model": "m", "prompt": "x"}] * 48)
        assert len({job.id.rpartition(".")[2] for job in jobs}) == 16
        streams = [asyncio.create_task(_collect(job)) for job in jobs]
        claimed = await _claim_all(queue, 48)
        assert {job.id for job in claimed} == {job.id for job in jobs}
        assert (await jobs[0].status()).served

        outcome = await queue.emit([_emission(job, 0) for job in claimed])
        assert (outcome.fenced, outcome.behind) == (frozenset(), frozenset())
        assert await queue.renew(claimed) == frozenset()

        released, failed, phantoms, finished = (claimed[n : n + 12] for n in range(0, 48, 12))
        assert len(await queue.release(released, "test")) == 12
        for job in failed:
            assert await queue.fail(job, "c", "m", retryable=False) == "failed"
        known = [job.id for job in finished]
        assert await queue.release_phantoms(known) == {job.id for job in phantoms}
        assert await queue.reclaim() == 0
        for job in finished + await _claim_all(other, 24):
            holder = queue if job in finished else other
            await holder.emit([_emission(job, 1)])
            assert await holder.finish(job, [], RESULT)

        for job, events in zip(jobs, await asyncio.gather(*streams)):
            expected = [1, 1] if job.id in {one.id for one in failed} else [1, 2, 2]
            assert [event.end for event in events] == expected
            assert [event.final for event in events][-1]
        assert client.link.reader.hub.num_lines <= 3
        assert sum((await queue.backlog()).values()) == 0
        await queue.leave()


async def test_an_idempotency_key_finds_its_job_on_a_cluster(cluster):
    async with AsyncClient(cluster, namespace="idem") as client:
        asked: dict[str, Any] = {"model": "m", "prompt": "x"}
        first = [await client.submit(**asked, idempotency_key=f"k{n}") for n in range(8)]
        again = [await client.submit(**asked, idempotency_key=f"k{n}") for n in range(8)]
        assert [job.id for job in first] == [job.id for job in again]
        assert all(job.deduplicated for job in again)


async def test_a_worker_waits_on_all_partitions_of_a_cluster(cluster, rung, queue_of):
    async with AsyncClient(cluster, namespace="bell") as client:
        queue = queue_of("bell")
        await queue.ensure()
        for _ in range(3):
            assert await queue.claim(1) == []
            waiting = asyncio.create_task(rung(queue))
            await client.submit(model="m", prompt="x")
            await waiting
            assert len(await queue.claim(1)) == 1


async def test_a_cancel_reaches_waiting_jobs_and_abandoned_ones_on_a_cluster(cluster, queue_of):
    async with AsyncClient(cluster, namespace="cancel") as client:
        queue = queue_of("cancel")
        await queue.ensure()
        job = await client.submit(model="m", prompt="x")
        assert await job.cancel() == "cancelled"
        job = await client.submit(model="m", prompt="x", on_disconnect="cancel")
        (claimed,) = await _claim_all(queue, 1)
        await queue.emit([_emission(claimed, 0)])
        stream = job.stream()
        await anext(stream)
        await stream.aclose()
        assert (await job.status()).cancel_requested


async def test_a_renewal_repeats_a_cancel_that_was_not_heard_on_a_cluster(cluster, queue_of):
    async with AsyncClient(cluster, namespace="again") as client:
        queue = queue_of("again")
        await queue.ensure()
        job = await client.submit(model="m", prompt="x")
        claimed = await _claim_all(queue, 1)
        assert await job.cancel() == "running"
        partition = partition_of(job.id)
        channel = queue.connection.keys(partition).control("w1")
        async with aclosing(Hub(queue.connection)) as hub:
            ear = await hub.subscribe(partition, channel)
            assert await ear.get(60) is REREAD
            await queue.renew(claimed)
            assert await ear.get(60) == f"cancel {job.id} 1".encode()


@pytest.fixture
async def connection(cluster: aio.RedisCluster) -> AsyncIterator[Connection]:
    connection = Connection(cluster, namespace="trouble")
    await connection.ready()
    yield connection
    await connection.aclose()


async def test_no_call_waits_while_the_servers_of_a_cluster_are_looked_for_again(
    connection, monkeypatch
):
    manager, asked, answers = connection.client.nodes_manager, asyncio.Event(), asyncio.Event()
    look = type(manager).initialize

    async def silent(manager: Any, **options: Any) -> None:
        asked.set()
        await answers.wait()
        await look(manager, **options)

    monkeypatch.setattr(type(manager), "initialize", silent)
    connection.client._initialize = True  # as after a call that was not answered
    for partition in range(connection.partitions):
        await connection.execute("EXISTS", connection.keys(partition).workers)
    await asked.wait()
    answers.set()


@pytest.fixture
async def half_moved(masters, connection: Connection) -> AsyncIterator[list[str]]:
    """Keys of a partition of which one has moved to another server already, as it seems."""
    names = connection.keys(3)
    found = [names.workers, names.dead]
    slot = await connection.client.cluster_keyslot(names.prefix)
    home = connection.client.get_node_from_key(names.prefix).port
    here = aio.Redis(port=home)
    there = aio.Redis(port=next(one.port for one in masters if one.port != home))
    ids = [(await one.execute_command("CLUSTER MYID")).decode() for one in (here, there)]
    await here.zadd(found[0], {"w": 1})
    await there.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
    await here.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
    yield found
    for one in (here, there):
        await one.execute_command("CLUSTER SETSLOT", slot, "STABLE")
        await one.aclose()


async def test_a_slot_on_its_way_to_another_server_is_unavailable_for_now(cluster, half_moved):
    """And not an error of redis-py that nobody knows of."""
    moving = Connection(cluster, namespace="trouble", connect_timeout_s=0.1)
    with pytest.raises(BrokerUnavailable):
        await moving.execute("EXISTS", *half_moved)
    await moving.aclose()


async def test_nothing_is_written_to_a_slot_where_it_does_not_lie_yet(
    cluster, connection, half_moved, masters
):
    """What is there when the keys come stops their move with BUSYKEY."""
    names = connection.keys(3)
    slot = await connection.client.cluster_keyslot(names.prefix)
    home = connection.client.get_node_from_key(names.prefix).port
    moving = Connection(cluster, namespace="trouble", connect_timeout_s=0.1)
    job_id = new_job_id(3)
    draft = Submission(moving).draft(JobRequest(model="m", prompt="x"), job_id=job_id)
    with pytest.raises(BrokerUnavailable):
        await Submission(moving).send([draft])
    for key in (names.delay, names.job(job_id)):
        with pytest.raises(BrokerUnavailable):
            await moving.execute("HSET", key, "a", 1)
    await moving.aclose()
    for one in masters:
        if one.port != home:
            async with aio.Redis(port=one.port) as server:
                assert await server.execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 0


async def test_a_slot_that_has_moved_is_followed(connection):
    manager, names = connection.client.nodes_manager, connection.keys(5)
    slot = await connection.client.cluster_keyslot(names.prefix)
    home = manager.slots_cache[slot][0]
    other = next(node for node in manager.nodes_cache.values() if node is not home)
    manager.slots_cache[slot] = [other]
    assert await connection.execute("EXISTS", names.workers) == 0
    assert manager.slots_cache[slot][0].name == home.name


async def test_a_slot_that_is_down_closes_no_connection_to_the_other_servers(
    connection, monkeypatch
):
    client, partitions = connection.client, range(connection.partitions)
    nodes = {p: client.get_node_from_key(connection.keys(p).prefix) for p in partitions}
    other = next(node for node in nodes.values() if node is not nodes[0])
    run = type(other).execute_command

    async def number() -> Any:
        return await client.execute_command("CLIENT ID", target_nodes=other)

    async def down(node: Any, *args: Any, **options: Any) -> Any:
        if node is nodes[0]:
            raise ClusterDownError("CLUSTERDOWN Hash slot not served")
        return await run(node, *args, **options)

    before = await number()
    monkeypatch.setattr(type(other), "execute_command", down)
    with pytest.raises(BrokerUnavailable):
        await connection.once("EXISTS", connection.keys(0).workers, line="a wait")
    assert await number() == before


async def _claim_all(queue: JobQueue, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += await queue.claim(count - len(found))
    return found


async def _collect(job: Any) -> list[Event]:
    return [event async for event in job.stream()]


def _emission(job: Any, offset: int) -> Emission:
    event = Event(offset=offset, token_ids=(offset,), text="a", attempt=job.attempt)
    return job.id, job.attempt, flat([event])


def _join(servers: list[EmbeddedServer]) -> None:
    nodes = [redis.Redis(port=server.port) for server in servers]
    bus = [server.ports["--cluster-port"] for server in servers]
    for number, node in enumerate(nodes):
        first = SLOTS * number // len(nodes)
        last = SLOTS * (number + 1) // len(nodes) - 1
        node.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        for other, port in zip(servers, bus):
            if other is not servers[number]:
                node.execute_command("CLUSTER MEET", "127.0.0.1", other.port, port)
    while not all(_sees_all(node, len(nodes)) for node in nodes):
        pass
    for node in nodes:
        node.close()


def _sees_all(node: redis.Redis, count: int) -> bool:
    info = node.execute_command("CLUSTER INFO")
    return info["cluster_state"] == "ok" and int(info["cluster_size"]) == count
