"""A client that is closed, forgotten or forked while others wait on it: nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tokenfleet.producer import (
    AsyncClient,
    BrokerUnavailable,
    Client,
    Job,
    StreamInterrupted,
    TokenfleetError,
)
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.hub import Hub
from tokenfleet.producer.protocol import Event
from tokenfleet.producer.subscription import REREAD
from tokenfleet.worker.claims import flat


async def _begun(lab: Any, client: AsyncClient, **fields: Any) -> Any:
    """A job with one logged token."""
    job = await client.submit(model="m", prompt="x", **fields)
    (claimed,) = await (await lab.queue()).claim(1)
    event = Event(offset=0, token_ids=(1,), text="a secret", attempt=1)
    await (await lab.queue()).emit([(claimed.id, 1, flat([event]))])
    return job


async def test_closing_ends_streams_and_waits_at_once_and_opens_nothing_again(valkey_lab, until):
    client = valkey_lab.client(silence_s=100.0)
    job = await _begun(valkey_lab, client, on_disconnect="cancel")
    reading, unread = job.stream(), job.stream()
    assert (await anext(reading)).text == "a secret"
    assert (await anext(unread)).end == 1
    follower, waiter = asyncio.create_task(anext(reading)), asyncio.create_task(job.result())
    await until(lambda: _num_waiting(client) == 2)
    await client.aclose()
    with pytest.raises(StreamInterrupted, match="offset 1: the client was closed") as cut:
        await follower
    assert cut.value.offset == 1
    with pytest.raises(BrokerUnavailable, match="closed"):
        await waiter
    with pytest.raises(StreamInterrupted, match="closed"):
        await anext(unread)
    assert client._link is None, "nothing was opened again"
    await valkey_lab.until(lambda: _subscribers(valkey_lab, job.id, 0))


def _num_waiting(client: AsyncClient) -> int:
    lines = client.link.reader.hub._lines.values()
    ears = [ear for line in lines for found in line._ears.values() for ear in found]
    return sum(ear._waiter is not None for ear in ears)


async def _subscribers(lab: Any, job_id: str, count: int) -> bool:
    found = await lab.raw.pubsub_numsub(lab.keys.events(job_id))
    return bool(found[0][1] == count)


async def test_who_listens_over_a_connection_that_is_closed_is_told(valkey_lab):
    lab = valkey_lab
    connection = Connection(lab.server.url, namespace=lab.namespace)
    hub = Hub(connection)
    ear = await hub.subscribe(0, "channel")
    assert await ear.get(60.0) is REREAD
    listening = asyncio.ensure_future(ear.get(600.0))
    await connection.aclose()
    with pytest.raises(BrokerUnavailable):
        await listening
    await hub.aclose()


async def test_a_closed_client_that_is_used_again_is_open_again(valkey_lab):
    client = valkey_lab.client()
    job = await client.submit(model="m", prompt="x")
    await client.aclose()
    assert await job.cancel() == "cancelled"
    assert [event.final async for event in job.stream()] == [True]


async def test_no_event_gets_into_the_log_of_redis_py(valkey_lab, caplog):
    caplog.set_level(logging.DEBUG)
    job = await _begun(valkey_lab, valkey_lab.client())
    stream = job.stream()
    await anext(stream)
    (claimed,) = [await valkey_lab.fields(job.id)]
    event = Event(offset=1, token_ids=(2,), text="another secret", attempt=1)
    await (await valkey_lab.queue()).emit([(job.id, 1, [1, *flat([event])[1:]])])
    assert (await anext(stream)).text == "another secret"
    await stream.aclose()
    assert claimed["state"] == "running"
    assert "secret" not in caplog.text


def test_a_client_of_a_loop_that_has_ended_can_be_closed(valkey):
    client = AsyncClient(valkey.url, namespace="closing")

    async def once() -> str:
        job = await client.submit(model="m", prompt="x")
        await client.link.connection.aclose()  # its sockets are this loop's to close
        return job.id

    assert asyncio.run(once())
    asyncio.run(client.aclose())


def test_a_client_is_not_closed_from_another_loop_while_its_own_lives(valkey):
    client = AsyncClient(valkey.url, namespace="closing")
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    first.run_until_complete(client.connect())
    with pytest.raises(TokenfleetError, match="another event loop"):
        second.run_until_complete(client.aclose())
    first.run_until_complete(client.aclose())
    first.close()
    second.close()


# the blocking client


class _Caller(threading.Thread):
    """Runs a call in a thread of its own and keeps what became of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call
        self.came: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except TokenfleetError as error:
            self.came = error

    def end(self) -> Exception | None:
        self.join()
        return self.came


def _wait_for_ears(client: Client, count: int) -> None:
    async def heard() -> bool:
        return _num_waiting(client._client) == count

    while not client.run(heard()):
        pass


def test_closing_ends_the_calls_of_other_threads(valkey):
    client = Client(valkey.url, namespace="closing", silence_s=100.0)
    job = client.submit(model="m", prompt="x")
    callers = [_Caller(lambda: next(job.stream())), _Caller(job.result)]
    _wait_for_ears(client, 2)
    client.close()
    stream, result = [caller.end() for caller in callers]
    assert isinstance(stream, StreamInterrupted)
    assert isinstance(result, BrokerUnavailable)
    client.close()
    with pytest.raises(TokenfleetError, match="this Client is closed"):
        job.status()
    with pytest.raises(TokenfleetError, match="this Client is closed"):
        next(job.stream())


def test_a_call_that_ends_no_other_way_ends_with_its_thread(valkey):
    client = Client(valkey.url, namespace="closing")
    client.connect()
    begun = threading.Event()

    async def stubborn() -> None:
        begun.set()
        await asyncio.Event().wait()

    caller = _Caller(lambda: client.run(stubborn()))
    begun.wait()
    client.close()
    assert "closed" in str(caller.end())


def test_a_stream_left_half_way_is_let_go_after_the_client_too(valkey):
    client = Client(valkey.url, namespace="closing")
    job = client.submit(model="m", prompt="x")
    job.cancel()
    stream, other = job.stream(), job.stream()
    assert next(stream).final
    assert next(other).final
    client.close()
    stream.close()
    with pytest.raises(StreamInterrupted, match="this Client is closed"):
        next(other)


def test_a_forgotten_client_takes_its_thread_along(valkey):
    client = Client(valkey.url, namespace="closing")
    client.connect()
    thread = client._thread._thread  # type: ignore[union-attr]  # it is connected
    del client
    gc.collect()
    thread.join()


def test_the_jobs_of_a_batch_are_made_in_the_callers_thread(valkey):
    seen = []

    def jobs() -> Iterator[dict[str, Any]]:
        seen.append(threading.current_thread())
        first = client.submit(model="m", prompt="first")
        yield {"model": "m", "prompt": "x", "metadata": {"after": first.id}}

    with Client(valkey.url, namespace="closing") as client:
        (job,) = client.submit_many(jobs())
        assert job.status().state == "waiting"
    assert seen == [threading.current_thread()]


def test_an_interrupted_wait_leaves_the_client_usable(valkey):
    with Client(valkey.url, namespace="closing", silence_s=100.0) as client:
        job = client.submit(model="m", prompt="x")

        def interrupt() -> None:
            _wait_for_ears(client, 1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]  # it runs

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            job.result()
        interrupter.join()
        assert job.cancel() == "cancelled"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parents_streams_alone(valkey):
    with Client(valkey.url, namespace="forking") as client:
        job = client.submit(model="m", prompt="x", on_disconnect="cancel")
        other = client.submit(model="m", prompt="x")
        other.cancel()
        ended = other.stream()
        assert next(ended).final
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, _told_in_child(ended, job).encode())
            os._exit(0)
        os.close(writer)
        told = os.read(reader, 1000).decode()
        os.close(reader)
        os.waitpid(child, 0)
        assert told == "a forked child has to open its own; waiting"
        assert next(ended, None) is None, "the parent reads on"
        assert job.status().state == "waiting"


def _told_in_child(stream: Any, job: Job) -> str:
    try:
        next(stream)
    except StreamInterrupted as error:
        del stream
        words = str(error)
        found = "a forked child has to open its own" if "forked child" in words else words
        return f"{found}; {job.status().state}"
    return "it read on"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_make_its_parents_connection_deaf(valkey):
    """They share a poller: what one takes out of it, the other hears no more."""

    async def collect() -> None:
        gc.collect()

    with Client(valkey.url, namespace="forking") as client:
        job = client.submit(model="m", prompt="x")
        stream = client.submit(model="m", prompt="x").stream()
        before = client.run(_connection_id(client))
        child = os.fork()
        if child == 0:
            try:
                job.status()
                client.run(collect())
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert client.run(_connection_id(client)) == before
        stream.close()


async def _connection_id(client: Client) -> Any:
    """By which the server knows the connection that commands go over."""
    return await client._client.link.connection.execute("CLIENT", "ID")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_while_a_thread_holds_a_lock_does_not_hang_the_child(valkey):
    from tokenfleet.producer import wire

    with Client(valkey.url, namespace="forking") as client:
        client.connect()
        with wire._lock, client._lock:
            child = os.fork()
            if child == 0:
                try:
                    client.submit(model="m", prompt="x")
                finally:
                    os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert client.submit(model="m", prompt="x").status().state == "waiting"
