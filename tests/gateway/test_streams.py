"""Streams: ids that name a place in the log, readers that come again, and readers that go.

The worker here is the test itself: what is logged, and when, is what each test says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tokenfleet.producer import (
    AsyncClient,
    Choice,
    Event,
    EventError,
    JobResult,
    JobStatus,
    Usage,
)
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.worker.claims import flat
from tokenfleet.worker.queue import ClaimedJob, JobQueue

_numbers = itertools.count(1)


class Hand:
    """A worker moved by hand, for a model of its own."""

    def __init__(self, queue: JobQueue, client: AsyncClient) -> None:
        self.queue = queue
        self.client = client
        self.model = queue.model_name

    async def claim(self) -> ClaimedJob:
        jobs: list[ClaimedJob] = await self.until(lambda: self.queue.claim(1))
        return jobs[0]

    async def say(self, job: ClaimedJob, *events: Event) -> Any:
        """Log events; what the queue says of the job."""
        return await self.queue.emit([(job.id, job.attempt, flat(events))])

    async def finish(self, job: ClaimedJob, text: str, offset: int) -> None:
        choice = Choice(text=text, token_ids=tuple(range(offset)), finish_reason="stop")
        result = JobResult(choices=(choice,), usage=Usage(3, offset))
        last = Event(offset=offset, attempt=job.attempt, finish_reason="stop")
        assert await self.queue.finish(job, flat([last]), result)

    async def status(self, job_id: str) -> JobStatus:
        return await self.client.job(job_id).status()

    async def until(self, check: Callable[[], Awaitable[Any]]) -> Any:
        """Ask again and again; the time limit ends a wait in vain."""
        while not (found := await check()):  # noqa: ASYNC110  # Redis has no event to wait for
            await asyncio.sleep(0.005)
        return found


@pytest.fixture
async def hand(gateway_server: EmbeddedServer, gateway: Any, tools: Any) -> AsyncIterator[Hand]:
    name = f"hand{next(_numbers)}"
    queue = JobQueue(
        gateway_server.url,
        namespace=tools.NAMESPACE,
        model_name=name,
        worker_id=name,
        lease_s=30.0,
    )
    async with (
        aclosing(queue),
        AsyncClient(gateway_server.url, namespace=tools.NAMESPACE) as client,
    ):
        await queue.ensure()
        yield Hand(queue, client)


def asked(hand: Hand, **fields: Any) -> dict[str, Any]:
    return {"model": hand.model, "prompt": "a secret", "stream": True, **fields}


def words(job: ClaimedJob, *texts: str, start: int = 0) -> list[Event]:
    return [
        Event(offset=start + n, attempt=job.attempt, token_ids=(n,), text=text)
        for n, text in enumerate(texts)
    ]


KEEP = {"tokenfleet-on-disconnect": "continue"}


async def test_a_stream_taken_up_at_any_id_gives_exactly_what_lies_behind(
    hand: Hand, web: httpx.AsyncClient, tools: Any
) -> None:
    asking = asyncio.create_task(web.post("/v1/completions", json=asked(hand), headers=KEEP))
    job = await hand.claim()
    await hand.say(job, *words(job, "one ", "two "))
    await hand.say(job, Event(offset=2, attempt=job.attempt, text="held back "))
    await hand.say(job, Event(offset=2, attempt=job.attempt, text="twice "))
    await hand.say(job, *words(job, "three", start=2))
    await hand.finish(job, "one two held back twice three", 3)
    whole = tools.sse_events((await asking).text)
    assert "".join(_text(data) for _, data in whole) == "one two held back twice three"
    ids = [event_id for event_id, data in whole if data != "[DONE]"]
    assert len(set(ids)) == len(ids) == 6
    for seen, last in enumerate(ids, start=1):
        again = await web.post("/v1/completions", json=asked(hand), headers={"last-event-id": last})
        assert tools.sse_events(again.text) == whole[seen:], last
        assert again.headers["x-request-id"] == job.id


def _text(data: Any) -> str:
    return "" if data == "[DONE]" else "".join(choice["text"] for choice in data["choices"])


async def test_the_role_is_said_once_even_when_the_stream_is_taken_up_again(
    hand: Hand, web: httpx.AsyncClient, tools: Any
) -> None:
    body = asked(hand, messages=[{"role": "user", "content": "hi"}])
    del body["prompt"]
    url = "/v1/chat/completions"
    asking = asyncio.create_task(web.post(url, json=body, headers=KEEP))
    job = await hand.claim()
    await hand.say(job, *words(job, "a", "b"))
    await hand.finish(job, "ab", 2)
    events = tools.sse_events((await asking).text)
    deltas = [data["choices"][0]["delta"] for _, data in events[:-1]]
    assert deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}, {}]
    again = await web.post(url, json=body, headers={"last-event-id": events[0][0]})
    first = tools.sse_events(again.text)[0][1]
    assert first["choices"][0]["delta"] == {"content": "b"}
    assert (first["id"], first["created"]) == (events[0][1]["id"], events[0][1]["created"])


async def test_a_reader_that_lost_the_connection_goes_on_while_the_job_runs(
    hand: Hand, web: httpx.AsyncClient, tools: Any
) -> None:
    async with web.stream("POST", "/v1/completions", json=asked(hand), headers=KEEP) as answer:
        job = await hand.claim()
        await hand.say(job, *words(job, "one ", "two "))
        lines = answer.aiter_lines()
        last = (await anext(lines)).removeprefix("id: ")
    url = f"/v1/completions/cmpl-{job.id}?stream=true"
    asking = asyncio.create_task(web.get(url, headers={"last-event-id": last}))
    await hand.say(job, *words(job, "three", start=2))
    await hand.finish(job, "one two three", 3)
    events = tools.sse_events((await asking).text)
    assert "".join(_text(data) for _, data in events) == "two three"


async def test_a_running_job_is_cancelled_when_its_reader_has_gone(
    hand: Hand, web: httpx.AsyncClient
) -> None:
    async with web.stream("POST", "/v1/completions", json=asked(hand)) as answer:
        job = await hand.claim()
        await hand.say(job, *words(job, "one "))
        assert await anext(answer.aiter_lines()) == f"id: {job.id}/1"

    async def told() -> bool:
        return (await hand.status(job.id)).cancel_requested

    await hand.until(told)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_waiting_job_is_cancelled_when_whoever_asked_has_gone(
    hand: Hand, gateway: Any, gateway_server: EmbeddedServer, *, stream: bool
) -> None:
    async with httpx.AsyncClient(
        base_url=gateway.url, headers={"authorization": f"Bearer {gateway.key}"}, timeout=240
    ) as web:
        asking = asyncio.create_task(web.post("/v1/completions", json=asked(hand, stream=stream)))
        (job_id,) = await hand.until(lambda: _waiting(hand))
        asking.cancel()

    async def ended() -> bool:
        return (await hand.status(job_id)).state == "cancelled"

    await hand.until(ended)
    line = await asyncio.to_thread(gateway.said, "request", job_id=job_id)
    assert line["path"] == "/v1/completions"


@pytest.mark.parametrize("stream", [True, False])
async def test_who_asks_again_with_its_key_after_a_lost_connection_finds_the_job(
    hand: Hand, web: httpx.AsyncClient, gateway: Any, *, stream: bool
) -> None:
    request = {"json": asked(hand, stream=stream), "headers": {"idempotency-key": hand.model}}
    asking = asyncio.create_task(web.post("/v1/completions", **request))
    job = await hand.claim()
    await hand.say(job, *words(job, "one "))
    asking.cancel()
    line = await asyncio.to_thread(gateway.said, "request", job_id=job.id)
    assert line["error"] == "client_closed"
    assert not (await hand.status(job.id)).cancel_requested
    asking = asyncio.create_task(web.post("/v1/completions", **request))
    await hand.say(job, *words(job, "two", start=1))
    await hand.finish(job, "one two", 2)
    answer = await asking
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == job.id


async def _waiting(hand: Hand) -> set[str]:
    """Ids of this model's jobs that have not ended."""
    connection = hand.client.link.connection
    ids = await connection.execute("ZRANGE", connection.keys(0).live(hand.model), 0, -1)
    return {job_id.decode() for job_id in ids}


@pytest.mark.parametrize("asks", [{"headers": KEEP}, {"fields": {"store": True}}])
async def test_a_job_that_is_to_go_on_does_so_and_can_be_fetched_as_a_whole(
    hand: Hand, web: httpx.AsyncClient, asks: dict[str, Any]
) -> None:
    body = asked(hand, **asks.get("fields", {}))
    async with web.stream(
        "POST", "/v1/completions", json=body, headers=asks.get("headers")
    ) as answer:
        job = await hand.claim()
        await hand.say(job, *words(job, "one "))
        await anext(answer.aiter_lines())
    early = await web.get(f"/v1/completions/cmpl-{job.id}")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "not_ended")
    outcome = await hand.say(job, *words(job, "two", start=1))
    assert job.id not in outcome.cancelled
    await hand.finish(job, "one two", 2)
    found = (await web.get(f"/v1/completions/cmpl-{job.id}")).json()
    assert found["id"] == f"cmpl-{job.id}"
    assert found["choices"][0]["text"] == "one two"
    assert found["usage"]["total_tokens"] == 5


async def test_another_tenants_response_is_not_there(
    hand: Hand, web: httpx.AsyncClient, keys: Any
) -> None:
    asking = asyncio.create_task(web.post("/v1/completions", json=asked(hand), headers=KEEP))
    job = await hand.claim()
    await hand.say(job, *words(job, "one"))
    await hand.finish(job, "one", 1)
    await asking
    bob = {"authorization": f"Bearer {keys.bob}"}
    url = f"/v1/completions/cmpl-{job.id}"
    nobody = "cmpl-0199c2f0-2b7e-7c61-9d3c-0a4b5c6d7e8f.0"
    for answer in (
        await web.get(url, headers=bob),
        await web.get(f"{url}?stream=true", headers=bob),
        await web.post(
            "/v1/completions", json=asked(hand), headers=bob | {"last-event-id": f"{job.id}/0"}
        ),
        await web.get(f"/v1/completions/{nobody}"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_expired")
    assert (await web.get(url)).status_code == 200


@pytest.mark.parametrize("last", ["x", "0199c2f0-2b7e-7c61-9d3c-0a4b5c6d7e8f.0/-1", "/", "a/1"])
async def test_a_last_event_id_that_no_stream_gave_is_refused(
    hand: Hand, web: httpx.AsyncClient, last: str
) -> None:
    answer = await web.post("/v1/completions", json=asked(hand), headers={"last-event-id": last})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"


async def test_a_job_that_fails_before_its_first_token_answers_with_a_status(
    hand: Hand, web: httpx.AsyncClient
) -> None:
    for stream in (True, False):
        asking = asyncio.create_task(web.post("/v1/completions", json=asked(hand, stream=stream)))
        job = await hand.claim()
        error = EventError("prompt_too_long", "the prompt has 9 tokens")
        await hand.queue.finish(job, [], None, state="failed", error=error)
        answer = await asking
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "prompt_too_long"
        assert answer.headers["x-should-retry"] == "false"


async def test_what_goes_wrong_in_the_middle_is_an_event_that_the_client_raises(
    hand: Hand, gateway: Any
) -> None:
    async with AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0
    ) as client:
        asking = asyncio.create_task(
            client.completions.create(model=hand.model, prompt="x", stream=True)
        )
        job = await hand.claim()
        await hand.say(job, *words(job, "one "))
        stream = await asking
        assert (await anext(stream)).choices[0].text == "one "
        await hand.client.job(job.id).cancel()
        await hand.queue.finish(job, [], None, state="cancelled")
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
        assert caught.value.code == "job_cancelled"


async def test_a_deadline_that_passes_is_a_timeout_that_is_not_tried_again(
    hand: Hand, web: httpx.AsyncClient
) -> None:
    answer = await web.post(
        "/v1/completions",
        json=asked(hand, stream=False),
        headers={"tokenfleet-deadline-s": "0.05"},
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"


async def test_a_silent_stream_is_kept_open_by_comments(
    hand: Hand, make_gateway: Callable[..., Any], tools: Any
) -> None:
    gateway = make_gateway("--keep-alive-s", "0.05")
    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=240) as web,
        web.stream("POST", "/v1/completions", json=asked(hand)) as answer,
    ):
        job = await hand.claim()
        lines = answer.aiter_lines()
        for _ in range(3):
            assert (await anext(lines), await anext(lines)) == (": keep-alive", "")
        await hand.say(job, *words(job, "one"))
        await hand.finish(job, "one", 1)
        rest = "\n".join([line async for line in lines])
    assert "".join(_text(data) for _, data in tools.sse_events(rest)) == "one"
    assert gateway.stop() == 0
