"""One request at a time: who may ask, how much, in which class, and what is said of it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from tokenfleet.producer import AsyncClient
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.gateway import body as request_body
from tokenfleet.producer.gateway.answers import GatewayError
from tokenfleet.worker.rules import Rules, TenantLimits

URL = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "ab", "max_tokens": 3, **fields}


def code_of(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


@pytest.fixture
async def fleet(gateway_server: EmbeddedServer, tools: Any) -> AsyncIterator[AsyncClient]:
    """A look behind the gateway."""
    async with AsyncClient(gateway_server.url, namespace=tools.NAMESPACE) as client:
        yield client


async def asked_for(fleet: AsyncClient, answer: httpx.Response, *names: str) -> list[str]:
    """Fields of the job that a request made."""
    job_id = answer.headers["x-request-id"]
    connection = fleet.link.connection
    found = await connection.execute("HMGET", connection.keys(0).job(job_id), *names)
    return [(value or b"").decode() for value in found]


def test_nobody_is_asked_for_nothing_but_a_key(gateway: Any) -> None:
    with httpx.Client(base_url=gateway.url, timeout=240) as web:
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic eDp5"}):
            answer = web.post(URL, json=body(), headers=headers)
            assert code_of(answer) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert web.post(URL, json=body(), headers={"api-key": gateway.key}).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "expected"),
    [
        (b"{", "application/json", (400, "invalid_json")),
        (b'{"model": NaN}', "application/json", (400, "invalid_json")),
        (b"[" * 60_000, "application/json", (400, "invalid_json")),
        (b"\xff", "application/json", (400, "invalid_json")),
        (b'{"half a pair": "\\ud800"}', "application/json", (400, "invalid_json")),
        (b'{"half a pair \\udfff": 1}', "application/json", (400, "invalid_json")),
        (b"[]", "application/json", (400, "invalid_type")),
        (b"model=m", "application/x-www-form-urlencoded", (415, "unsupported_media_type")),
        (b" " * 65_537, "application/json", (413, "body_too_large")),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(
    http: httpx.Client, content: bytes, kind: str, expected: tuple[int, str]
) -> None:
    answer = http.post(URL, content=content, headers={"content-type": kind})
    assert code_of(answer) == expected
    assert answer.headers["x-should-retry"] == "false"


def test_a_body_that_comes_compressed_is_refused_by_that_name(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = http.post(URL, content=gzip.compress(json.dumps(body()).encode()), headers=headers)
    assert code_of(answer) == (415, "unsupported_content_encoding")


@pytest.mark.parametrize(
    ("field", "code"),
    [("output_expires_after", "unsupported_parameter"), ("nonsense", "unknown_parameter")],
)
def test_what_would_be_dropped_of_a_batch_is_refused_by_name(
    http: httpx.Client, field: str, code: str
) -> None:
    known = {"input_file_id": "x", "endpoint": URL, "completion_window": "24h"}
    answer = http.post("/v1/batches", json={**known, field: {"seconds": 3600}})
    assert code_of(answer) == (400, code)
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "code"),
    [("expires_after[seconds]", "unsupported_parameter"), ("nonsense", "unknown_parameter")],
)
def test_what_would_be_dropped_of_a_file_is_refused_by_name(
    http: httpx.Client, field: str, code: str
) -> None:
    form = {"purpose": "batch", field: "3600"}
    answer = http.post("/v1/files", files={"file": ("in.jsonl", b"{}")}, data=form)
    assert code_of(answer) == (400, code)


def test_a_list_has_an_order_that_there_is(http: httpx.Client) -> None:
    assert code_of(http.get("/v1/files?order=random")) == (400, "invalid_value")
    assert http.get("/v1/files?order=asc").status_code == 200


@pytest.mark.parametrize("limit", ["0", "x", "10001", "9" * 5000])
def test_a_list_is_not_longer_than_it_may_be(http: httpx.Client, limit: str) -> None:
    assert code_of(http.get("/v1/files", params={"limit": limit})) == (400, "invalid_value")


def test_a_body_without_a_length_is_counted_as_it_comes(http: httpx.Client) -> None:
    def endless() -> Any:
        for _ in range(100):
            yield b" " * 1000

    answer = http.post(URL, content=endless(), headers={"content-type": "application/json"})
    assert code_of(answer) == (413, "body_too_large")


async def test_a_sender_that_falls_silent_in_its_body_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = iter([{"type": "http.request", "body": b"{", "more_body": True}])

    async def receive() -> Any:
        for message in sent:
            return message
        return await asyncio.Future()

    for limit in ("PIECE_S", "JSON_BODY_S"):
        with monkeypatch.context() as patch:
            patch.setattr(request_body, limit, 0.01)
            request = Request({"type": "http", "headers": []}, receive)
            with pytest.raises(GatewayError) as found:
                await request_body.json_body(request, 1000)
            assert found.value.answer.status_code == 408


def test_a_file_that_is_too_large_is_refused(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/files", files={"file": ("x", b" " * 1_100_000)}, data={"purpose": "batch"}
    )
    assert code_of(answer) == (413, "body_too_large")


def test_what_is_not_there_is_said_in_the_same_shape(http: httpx.Client) -> None:
    assert code_of(http.get("/v1/embeddings")) == (404, "not_found")
    answer = http.get("/v1/completions")
    assert code_of(answer) == (405, "method_not_allowed")
    assert "POST" in answer.headers["allow"]
    assert "use POST" in answer.json()["error"]["message"]
    for path in (
        "/v1/files/..%2f..%2fetc",
        "/v1/files/file-0",
        "/v1/batches/../../x",
        "/v1/batches/x",
    ):
        assert http.get(path).status_code == 404


async def test_the_class_is_asked_for_by_header_or_tier_and_capped_by_the_key(
    web: httpx.AsyncClient, fleet: AsyncClient, keys: Any
) -> None:
    bob = {"authorization": f"Bearer {keys.bob}"}
    flex = {"service_tier": "flex"}
    for fields, headers, expected in (
        ({}, {}, "interactive"),
        ({"service_tier": "default"}, {}, "interactive"),
        (flex, {}, "batch"),
        (flex, {"tokenfleet-priority": "default"}, "default"),
        ({}, bob, "batch"),
    ):
        answer = await web.post(URL, json=body(**fields), headers=headers)
        assert await asked_for(fleet, answer, "priority") == [expected]
    wrong = await web.post(URL, json=body(), headers={"tokenfleet-priority": "urgent"})
    assert code_of(wrong) == (400, "invalid_value")
    more = await web.post(URL, json=body(), headers=bob | {"tokenfleet-priority": "default"})
    assert code_of(more) == (403, "priority_not_allowed")


async def test_a_key_says_whose_job_it_is(
    web: httpx.AsyncClient, fleet: AsyncClient, keys: Any
) -> None:
    for key, tenant in ((keys.alice, "alice"), (keys.bob, "bob")):
        answer = await web.post(URL, json=body(), headers={"authorization": f"Bearer {key}"})
        assert await asked_for(fleet, answer, "tenant") == [tenant]


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "inf"])
def test_a_deadline_that_is_no_time_is_refused(http: httpx.Client, seconds: str) -> None:
    answer = http.post(URL, json=body(), headers={"tokenfleet-deadline-s": seconds})
    assert code_of(answer) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == "Tokenfleet-Deadline-S"


async def test_a_deadline_goes_along_with_the_job(
    web: httpx.AsyncClient, fleet: AsyncClient
) -> None:
    answer = await web.post(URL, json=body(), headers={"tokenfleet-deadline-s": "60"})
    submitted, deadline = await asked_for(fleet, answer, "submitted", "deadline")
    assert int(deadline) - int(submitted) == 60_000


def test_the_same_idempotency_key_is_the_same_job(http: httpx.Client) -> None:
    headers = {"idempotency-key": "once"}
    first, again = (http.post(URL, json=body(), headers=headers) for _ in range(2))
    assert first.json() == again.json()
    other = http.post(URL, json=body(prompt="other"), headers=headers)
    assert code_of(other) == (409, "idempotency_mismatch")


async def test_a_trace_goes_on_behind_the_gateway_and_a_broken_one_does_not(
    web: httpx.AsyncClient, fleet: AsyncClient, gateway: Any
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    parent = f"00-{trace_id}-b7ad6b7169203331-01"
    answer = await web.post(URL, json=body(), headers={"traceparent": parent})
    assert await asked_for(fleet, answer, "traceparent") == [parent]
    assert gateway.request_line(answer.headers["x-request-id"])["trace_id"] == trace_id
    answer = await web.post(URL, json=body(), headers={"traceparent": "00-nonsense"})
    assert await asked_for(fleet, answer, "traceparent") == [""]


async def test_a_tenant_with_too_many_waiting_is_told_when_to_come_back(
    web: httpx.AsyncClient, fleet: AsyncClient
) -> None:
    rules = Rules(fleet.link.connection)
    await rules.set_limits(TenantLimits("alice", running=0, waiting=0))
    try:
        for stream in (False, True):
            answer = await web.post(URL, json=body(stream=stream))
            assert code_of(answer) == (429, "queue_full")
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-should-retry"] == "true"
    finally:
        await rules.remove_limits("alice")


def test_a_page_of_another_origin_may_call_where_the_settings_name_it(http: httpx.Client) -> None:
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    good = http.options(URL, headers={"origin": "https://chat.example", **asks})
    assert good.headers["access-control-allow-origin"] == "https://chat.example"
    bad = http.options(URL, headers={"origin": "https://evil.example", **asks})
    assert "access-control-allow-origin" not in bad.headers
    real = http.post(URL, json=body(), headers={"origin": "https://chat.example"})
    assert "x-request-id" in real.headers["access-control-expose-headers"]


def test_a_request_is_one_line_with_its_figures_and_none_of_its_words(
    http: httpx.Client, gateway: Any
) -> None:
    secret = "sesame-open"
    for fields in ({"prompt": secret}, {"prompt": secret, "stream": True}, {"nonsense": secret}):
        answer = http.post(URL, json=body(**fields))
        line = gateway.request_line(answer.headers["x-request-id"])
        assert (line["method"], line["path"], line["tenant"]) == ("POST", URL, "alice")
        assert line["status"] == answer.status_code
        if answer.status_code == 200:
            assert (line["model"], line["completion_tokens"]) == ("m", 3)
            assert line["ttft_ms"] > 0
    log = gateway.log.read_text()
    assert secret not in log
    assert gateway.key not in log


def test_a_model_that_nobody_serves_yet_is_taken_where_its_queue_waits(
    http: httpx.Client, gateway: Any
) -> None:
    assert code_of(http.post(URL, json=body(model="nope"))) == (404, "model_not_found")
    assert code_of(http.get("/v1/models/nope")) == (404, "model_not_found")
    listed = http.get("/v1/models").json()["data"]
    (served,) = [model for model in listed if model["id"] == "m"]
    assert served["tokenfleet"] == {"workers": 1}


def test_half_a_surrogate_pair_is_refused_and_no_fault(http: httpx.Client) -> None:
    answer = http.post(URL, content=json.dumps(body(prompt="\ud800")).encode())
    assert answer.status_code == 400
