"""/metrics of the gateway: every request is counted once, as what it came to."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from starlette.routing import Route

from tokenfleet.producer.gateway.metrics import GatewayMetrics, Passage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PAUSE_S = 0.02


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "ab", "max_tokens": 3, **fields}


@pytest.fixture
def counted(gateway: Any, keys: Any) -> Callable[..., float]:
    """counted(name, **labels): a figure of the session's gateway now; 0 when it is not there."""

    def read(name: str, **labels: str) -> float:
        headers = {"authorization": f"Bearer {keys.operator}"}
        page = httpx.get(f"{gateway.url}/metrics", headers=headers, timeout=240)
        assert page.status_code == 200
        for family in plain(page.text):
            for sample in family.samples:
                if sample.name == f"tokenfleet_gateway_{name}" and sample.labels == labels:
                    return sample.value
        return 0.0

    until(lambda: read("requests_running") == 1)  # what other tests began has been counted
    return read


def until(check: Callable[[], bool]) -> None:
    """A request is counted just after its answer; the time limit ends a wait in vain."""
    while not check():
        time.sleep(PAUSE_S)


def test_every_answer_is_counted_by_its_route_and_status(
    http: httpx.Client, counted: Callable[..., float]
) -> None:
    asked = [
        (COMPLETIONS, "200", lambda: http.post(COMPLETIONS, json=body())),
        (COMPLETIONS, "400", lambda: http.post(COMPLETIONS, content=b"{")),
        (CHAT, "404", lambda: http.post(CHAT, json={"model": "nope", "messages": [
            {"role": "user", "content": "x"}]})),
        (COMPLETIONS, "405", lambda: http.get(COMPLETIONS)),
        ("/v1/models/{model}", "200", lambda: http.get("/v1/models/m")),
        ("/v1/files/{file_id}/content", "404", lambda: http.get("/v1/files/file-0/content")),
        ("other", "404", lambda: http.get("/v1/embeddings")),
    ]  # fmt: skip
    for route, status, ask in asked:
        before = counted("requests_total", route=route, status=status)
        took = counted("request_duration_seconds_count", route=route)
        ask()
        until(lambda: counted("requests_total", route=route, status=status) == before + 1)  # noqa: B023  # called at once
        assert counted("request_duration_seconds_count", route=route) == took + 1, route


def test_a_stream_says_when_its_first_token_came_and_what_of_it_is_the_gateways(
    http: httpx.Client, counted: Callable[..., float]
) -> None:
    names = ("time_to_first_token_seconds", "first_token_added_seconds")
    before = {name: counted(f"{name}_count") for name in names}
    sums = {name: counted(f"{name}_sum") for name in names}
    http.post(COMPLETIONS, json=body())
    assert {name: counted(f"{name}_count") for name in names} == before, "it is no stream"
    answer = http.post(COMPLETIONS, json=body(stream=True))
    again = {name: counted(f"{name}_count") for name in names}
    assert again == {name: count + 1 for name, count in before.items()}
    whole, added = (counted(f"{name}_sum") - sums[name] for name in names)
    assert 0 < added <= whole
    where = f"{COMPLETIONS}/cmpl-{answer.headers['x-request-id']}?stream=true"
    assert http.get(where).status_code == 200
    assert {name: counted(f"{name}_count") for name in names} == again, "nobody waited for it"


def test_streams_are_open_until_they_end_and_a_client_that_goes_is_counted(
    http: httpx.Client, gateway: Any, counted: Callable[..., float]
) -> None:
    streams, gone = counted("streams_open"), counted("readers_gone_total")
    with http.stream("POST", COMPLETIONS, json=body(max_tokens=8000, stream=True)) as answer:
        lines = answer.iter_lines()  # held: the connection closes with it
        next(lines)
        assert counted("streams_open") == streams + 1
        assert counted("requests_running") >= 2, "the stream, and the one that asks"
    line = gateway.request_line(answer.headers["x-request-id"])
    assert line["error"] == "client_closed"
    assert counted("streams_open") == streams
    assert counted("readers_gone_total") == gone + 1


def test_a_client_that_goes_before_its_answer_is_counted_too(
    http: httpx.Client, counted: Callable[..., float]
) -> None:
    gone = counted("readers_gone_total")
    left = counted("requests_total", route=COMPLETIONS, status="499")
    with pytest.raises(httpx.ReadTimeout):  # having sent all of it
        http.post(COMPLETIONS, json=body(max_tokens=8000), timeout=httpx.Timeout(240, read=0.5))
    until(lambda: counted("readers_gone_total") == gone + 1)
    assert counted("requests_total", route=COMPLETIONS, status="499") == left + 1


def test_a_client_that_goes_in_the_middle_of_its_body_is_no_fault_of_ours(
    gateway: Any, counted: Callable[..., float]
) -> None:
    left = counted("requests_total", route=COMPLETIONS, status="499")
    broke = counted("requests_total", route=COMPLETIONS, status="500")
    place = httpx.URL(gateway.url)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
    with socket.create_connection((place.host, place.port)) as line:
        line.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
        until(lambda: counted("requests_running") >= 2)
    until(lambda: counted("requests_total", route=COMPLETIONS, status="499") == left + 1)
    assert counted("requests_total", route=COMPLETIONS, status="500") == broke


def test_only_a_key_that_may_see_the_fleet_sees_its_figures(
    gateway: Any, keys: Any, make_gateway: Callable[..., Any]
) -> None:
    with httpx.Client(base_url=gateway.url, timeout=240) as web:
        assert web.get("/metrics").status_code == 401
        alice = {"authorization": f"Bearer {keys.alice}"}
        assert web.get("/metrics", headers=alice).status_code == 403
        assert web.get("/metrics", auth=("any", keys.operator)).status_code == 200
    off = make_gateway("--metrics", "off")
    assert httpx.get(f"{off.url}/metrics", timeout=240).status_code == 404


def test_figures_come_in_either_format_and_without_a_key_where_the_settings_say_so(
    keys: Any, make_gateway: Callable[..., Any]
) -> None:
    gateway = make_gateway("--metrics", "open", "--keys-file", str(keys.path))
    for accept, parse in (("", plain), ("application/openmetrics-text;version=1.0.0", openmetrics)):
        page = httpx.get(f"{gateway.url}/metrics", headers={"accept": accept}, timeout=240)
        families = {family.name: family.type for family in parse(page.text)}
        assert families["tokenfleet_gateway_first_token_added_seconds"] == "histogram"
        assert "tokenfleet_gateway_requests" in families


def test_what_is_added_is_the_way_in_and_the_way_out() -> None:
    now = [100.0]
    metrics = GatewayMetrics([Route("/x/{y:path}", lambda _: None)], clock=lambda: now[0])
    passage = Passage(100.0, submitted_at=100.25, first_token_at=104.0)
    now[0] = 104.5
    metrics.first_sent(passage)
    assert passage.first_sent_at == 104.5
    _, page = metrics.render()
    sums = {s.name: s.value for f in plain(page.decode()) for s in f.samples if "_sum" in s.name}
    assert sums["tokenfleet_gateway_first_token_added_seconds_sum"] == 0.75
    assert sums["tokenfleet_gateway_time_to_first_token_seconds_sum"] == 4.5


def test_statuses_that_are_rare_are_there_before_they_happen() -> None:
    _, page = GatewayMetrics([]).render()
    rows = [s for f in plain(page.decode()) for s in f.samples if s.name.endswith("requests_total")]
    assert {(s.labels["route"], s.labels["status"], s.value) for s in rows} == {
        (route, status, 0.0)
        for route in (CHAT, COMPLETIONS)
        for status in ("200", "429", "499", "500", "503")
    }
