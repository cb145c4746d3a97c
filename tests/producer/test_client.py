"""The client: what it sends, how it waits, and what it says when something is wrong."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import redis
import redis.asyncio as aio
from opentelemetry import trace

from tokenfleet.producer import (
    AsyncClient,
    BrokerUnavailable,
    BrokerUnsupported,
    Client,
    DeadlineExceeded,
    InvalidJob,
    JobCancelled,
    JobExpired,
    JobFailed,
    ResultTimeout,
    SamplingParams,
    TokenfleetError,
    tracing,
)
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.given import Given
from tokenfleet.producer.greeting import check_greeting
from tokenfleet.producer.keys import new_job_id
from tokenfleet.producer.protocol import Choice, Event, EventError, JobResult
from tokenfleet.worker.claims import flat

RESULT = JobResult(choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="stop"),))


async def test_a_job_arrives_as_it_was_asked_for(lab):
    client = lab.client(tenant="acme")
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hello"}],
        "sampling": SamplingParams(max_tokens=64, temperature=0.0, stop=("x",)),
        "priority": "interactive",
        "deadline_s": 60.0,
        "metadata": {"a": [1, 2]},
        "adapter": "lora",
    }
    job = await client.submit(model="m", **asked)
    (claimed,) = await (await lab.queue()).claim(1)
    assert claimed.id == job.id
    assert claimed.request.tenant == "acme"
    assert claimed.request.messages == ({"role": "user", "content": "Hello"},)
    for name in ("sampling", "priority", "deadline_s", "metadata", "adapter"):
        assert getattr(claimed.request, name) == asked[name]
    assert claimed.deadline_ms == claimed.submitted_ms + 60_000


async def test_submit_many_keeps_order_and_checks_all_before_it_sends_any(lab):
    client = lab.client()
    jobs = await client.submit_many(
        [
            {"model": "m", "prompt": f"{n}", "priority": ("batch", "default")[n % 2]}
            for n in range(300)
        ]
    )
    queue = await lab.queue()
    claimed = {job.id: job.request.prompt for _ in range(3) for job in await queue.claim(128)}
    assert [claimed[job.id] for job in jobs] == [f"{n}" for n in range(300)]
    for bad in ({"model": "m"}, {"model": "m", "prompt": "x", "temperature": 1.0}):
        with pytest.raises(InvalidJob):
            await client.submit_many([{"model": "m", "prompt": "x"}, bad])
    assert await queue.claim(1) == []


async def test_jobs_submitted_together_wait_in_the_order_of_their_list(valkey_lab):
    """In however many calls they came: the first ones are sent before the others."""
    client = valkey_lab.client()
    for count in (7, 30, 150):
        jobs = await client.submit_many([{"model": "m", "prompt": "x"} for _ in range(count)])
        queue = await valkey_lab.queue()
        claimed = [job.id for _ in range(count) for job in await queue.claim(1)]
        assert claimed == [job.id for job in jobs]


async def test_a_result_comes_when_the_job_ends(lab):
    queue = await lab.queue()
    job = lab.client().job(await lab.submit())
    waiting = asyncio.create_task(job.result(timeout_s=240))
    (claimed,) = await queue.claim(1)
    event = Event(offset=0, token_ids=(1, 2), text="ab", attempt=1)
    await queue.emit([(job.id, 1, flat([event]))])
    await queue.finish(claimed, [], RESULT)
    assert (await waiting).text == "ab"
    assert (await job.result()).finish_reason == "stop"


async def test_a_result_that_does_not_come_in_time_cancels_nothing(lab):
    job = lab.client().job(await lab.submit())
    with pytest.raises(ResultTimeout, match=r"is waiting after 0\.3 s") as caught:
        await job.result(timeout_s=0.3)
    assert isinstance(caught.value, TimeoutError)
    assert (await job.status()).state == "waiting"


async def test_a_result_that_is_there_needs_no_time(lab):
    client, queue = lab.client(), await lab.queue()
    job = await client.submit(model="m", prompt="x")
    with pytest.raises(ResultTimeout, match="waiting after 0 s"):
        await job.result(timeout_s=0)
    (claimed,) = await queue.claim(1)
    await queue.finish(claimed, [], RESULT)
    assert (await job.result(timeout_s=0)).token_ids == RESULT.token_ids
    with pytest.raises(JobExpired):
        await client.job(new_job_id(0)).result(timeout_s=0)


async def test_each_bad_end_has_an_error_of_its_own(lab):
    queue, client = await lab.queue(), lab.client()
    failed, cancelled, late = [client.job(await lab.submit(deadline_s=99)) for _ in range(3)]
    (job,) = await queue.claim(1)
    await queue.finish(job, [], None, state="failed", error=EventError("too_long", "shorten it"))
    await cancelled.cancel()
    await lab.raw.hset(lab.keys.job(late.id), "deadline", 1)
    with pytest.raises(JobFailed, match="shorten it") as caught:
        await failed.result()
    assert (caught.value.code, caught.value.attempts) == ("too_long", 1)
    with pytest.raises(JobCancelled):
        await cancelled.result()
    with pytest.raises(DeadlineExceeded):
        await late.result()
    assert (await failed.status()).error == EventError("too_long", "shorten it")


async def test_the_status_follows_the_job(lab):
    queue = await lab.queue("w1")
    job = lab.client().job(await lab.submit(delay_s=0.0, priority="batch"))
    status = await job.status()
    assert (status.state, status.attempt, status.owner, status.offset) == ("waiting", 0, None, 0)
    (claimed,) = await queue.claim(1)
    event = Event(offset=0, token_ids=(1, 2), text="ab", attempt=1)
    await queue.emit([(job.id, 1, flat([event]))])
    status = await job.status()
    assert (status.state, status.attempt, status.owner, status.offset) == ("running", 1, "w1", 2)
    assert (status.model, status.priority, status.ended_ms) == ("m", "batch", None)
    await queue.finish(claimed, [], RESULT)
    status = await job.status()
    assert (status.state, status.owner) == ("finished", None)
    assert status.ended_ms >= status.submitted_ms


@pytest.mark.parametrize("port", [1, 9])
async def test_a_redis_that_is_not_there_is_told_after_the_timeout(port):
    client = AsyncClient(f"redis://127.0.0.1:{port}/0", connect_timeout_s=0.2)
    with pytest.raises(BrokerUnavailable, match=f"127.0.0.1:{port} was not reached within 0.2"):
        await client.connect()
    await client.aclose()


async def test_a_password_is_in_no_message():
    client = AsyncClient("redis://user:hunter2@127.0.0.1:1/0", connect_timeout_s=0.1)
    with pytest.raises(BrokerUnavailable) as caught:
        await client.connect()
    assert "hunter2" not in str(caught.value)
    await client.aclose()


async def test_a_server_that_hangs_is_not_waited_for_for_ever(own_lab):
    client = own_lab.client(connect_timeout_s=3.0)
    await client.connect()
    own_lab.server.pause()
    with pytest.raises(BrokerUnavailable):
        await client.submit(model="m", prompt="x")
    own_lab.server.resume()


async def test_a_submit_over_a_restart_makes_exactly_one_job(own_lab):
    client = own_lab.client()
    await client.connect()
    own_lab.server.kill()
    submitting = asyncio.create_task(client.submit(model="m", prompt="x"))
    own_lab.server.start()
    job = await submitting
    assert (await job.status()).state == "waiting"
    assert await own_lab.connection.execute("ZCARD", own_lab.keys.live("m")) == 1


@pytest.mark.parametrize(
    "broker",
    [
        "redis://localhost/0?decode_responses=true",
        aio.Redis(decode_responses=True),
        redis.Redis(decode_responses=True),
    ],
    ids=["url", "asyncio", "blocking"],
)
@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_a_client_that_decodes_responses_is_refused_at_construction(kind, broker):
    with pytest.raises(BrokerUnsupported, match="decode_responses"):
        kind(broker)


@pytest.mark.parametrize("broker", [None, 7, object()])
def test_what_is_no_redis_is_refused(broker):
    with pytest.raises(InvalidJob, match="redis_url"):
        AsyncClient(broker)


@pytest.mark.parametrize(
    ("server", "version", "fine"),
    [
        ("redis", "6.2.14", False),
        ("redis", "7.0.0", True),
        ("redis", "8.4.1", True),
        ("valkey", "7.1.9", False),
        ("valkey", "7.2.0", True),
        ("valkey", "9.1.2", True),
    ],
)
def test_a_server_that_is_too_old_is_named(server, version, fine):
    hello = {"server": server.encode(), "version": version.encode()}
    given = Given("redis://localhost")
    if fine:
        check_greeting(hello, given)
    else:
        with pytest.raises(BrokerUnsupported, match=f"{server} {version} is too old"):
            check_greeting(hello, given)


async def test_redis_py_clients_are_taken_for_their_address(valkey):
    theirs = aio.Redis.from_url(valkey.url)
    blocking = redis.Redis.from_url(valkey.url)
    for broker in (theirs, blocking):
        async with AsyncClient(broker, namespace="given") as client:
            job = await client.submit(model="m", prompt="x")
            assert await job.cancel() == "cancelled"
    assert await theirs.ping()  # still open, still theirs
    await theirs.aclose()
    blocking.close()


async def test_a_wrong_password_is_told_at_once_and_not_tried_again_and_again(own_lab):
    await own_lab.raw.execute_command("ACL", "SETUSER", "someone", "on", ">secret", "~*", "+@all")
    url = own_lab.server.url.replace("redis://", "redis://someone:wrong@")
    client = AsyncClient(url, connect_timeout_s=3600.0)  # not waited for: the test would never end
    with pytest.raises(BrokerUnsupported, match="refuses"):
        await client.connect()
    await client.aclose()


def test_one_client_serves_several_event_loops_one_after_the_other(valkey):
    client = AsyncClient(valkey.url, namespace="loops")

    async def once() -> str:
        try:
            return (await client.submit(model="m", prompt="x")).id
        finally:
            await client.aclose()

    assert asyncio.run(once()) != asyncio.run(once())


def test_a_client_of_another_running_loop_says_so(valkey):
    client = AsyncClient(valkey.url, namespace="loops")
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    first.run_until_complete(client.connect())
    with pytest.raises(TokenfleetError, match="another event loop"):
        second.run_until_complete(client.connect())
    first.run_until_complete(client.aclose())
    first.close()
    second.close()


async def test_a_call_that_is_cancelled_at_any_moment_ends(valkey):
    """asyncio.wait_for, which redis-py sends under, loses a cancel before Python 3.12."""
    for moment in range(60):
        client = AsyncClient(valkey.url, namespace="cancelled")
        call = asyncio.create_task(client.connect())
        for _ in range(moment % 20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0002 * (moment % 7))
        ended = call.done()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() or ended
        await client.aclose()


# the blocking client


def test_the_blocking_client_has_the_same_names_and_answers(valkey):
    with Client(valkey.url, namespace="blocking") as client:
        job = client.submit(model="m", prompt="x", idempotency_key="k")
        assert client.submit(model="m", prompt="x", idempotency_key="k").deduplicated
        assert job.status().state == "waiting"
        with pytest.raises(ResultTimeout):
            job.result(timeout_s=0.05)
        assert client.job(job.id).cancel() == "cancelled"
        (event,) = job.stream()
        assert (event.final, event.finish_reason) == (True, "cancelled")
        assert len(client.submit_many([{"model": "m", "prompt": "x"}] * 3)) == 3
    with pytest.raises(TokenfleetError, match="closed"):
        client.submit(model="m", prompt="x")


def test_leaving_a_blocking_stream_early_ends_a_job_that_asked_for_it(valkey):
    with Client(valkey.url, namespace="leaving") as client:
        job = client.submit(model="m", prompt="x", on_disconnect="cancel")
        _start_one(valkey, "leaving")
        for _ in job.stream():
            break
        assert job.status().cancel_requested


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_connections_of_its_own(valkey):
    with Client(valkey.url, namespace="forked") as client:
        first = client.submit(model="m", prompt="parent")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, client.submit(model="m", prompt="child").id.encode())
            os._exit(0)
        os.close(writer)
        told = os.read(reader, 100).decode()
        os.close(reader)
        assert os.waitpid(child, 0)[1] == 0
        assert client.job(told).status().state == "waiting"
        assert client.job(first.id).status().state == "waiting"


def _start_one(server: EmbeddedServer, namespace: str) -> None:
    """Claim the waiting job and log one token."""
    from tokenfleet.worker.queue import JobQueue

    async def run() -> None:
        queue = JobQueue(server.url, namespace=namespace, model_name="m", worker_id="w1")
        await queue.ensure()
        (job,) = await queue.claim(1)
        event = Event(offset=0, token_ids=(1,), text="a", attempt=1)
        await queue.emit([(job.id, 1, flat([event]))])
        await queue.aclose()

    asyncio.run(run())


# the trace


def _inside_a_trace() -> Any:
    context = trace.SpanContext(
        trace_id=0x0AF7651916CD43DD8448EB211C80319C,
        span_id=0xB7AD6B7169203331,
        is_remote=False,
        trace_flags=trace.TraceFlags(1),
    )
    return trace.use_span(trace.NonRecordingSpan(context))


async def test_the_trace_that_a_job_is_submitted_in_goes_with_it(valkey_lab):
    client, queue = valkey_lab.client(), await valkey_lab.queue()
    with _inside_a_trace():
        job = await client.submit(model="m", prompt="x")
        await client.submit_many([{"model": "m", "prompt": "x"}] * 2)
    claimed = await queue.claim(3)
    traces = [one.request.traceparent.split("-")[1] for one in claimed]
    assert traces == ["0af7651916cd43dd8448eb211c80319c"] * 3
    fields = await valkey_lab.fields(job.id)
    assert fields["traceparent"] == claimed[0].request.traceparent


async def test_a_job_outside_a_trace_carries_none_and_a_malformed_one_does_no_harm(valkey_lab):
    client, queue = valkey_lab.client(), await valkey_lab.queue()
    await client.submit(model="m", prompt="x")
    await client.submit(model="m", prompt="x", traceparent="nonsense")
    first, second = await queue.claim(2)
    assert first.request.traceparent is None
    assert second.request.traceparent == "nonsense"
    assert tracing.trace_id_of("nonsense") is None
