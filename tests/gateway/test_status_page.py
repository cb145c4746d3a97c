"""The status page: what it shows, to whom, and that no name on it is more than a text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.fleet_view import FleetStatus, QueueDepth, RunningJob, WorkerLine
from tokenfleet.producer.gateway.app import create_app
from tokenfleet.producer.gateway.page.fragment import fragment
from tokenfleet.producer.gateway.page.plots import Series, ceiling, plot, short
from tokenfleet.producer.gateway.settings import GatewaySettings
from tokenfleet.producer.gateway.status import Sampler
from tokenfleet.worker.queue import JobQueue

HOSTILE = "<img src=x onerror=alert(1)>\"'></td><script>alert(2)</script>&amp;"
VOID = {"meta", "link", "rect", "line", "path", "br", "img"}


class Parsed(HTMLParser):
    """A page's elements and texts; raises for tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def a_worker(**fields: Any) -> WorkerLine:
    given = {
        "worker": "w1", "model": "m", "host": "h", "state": "ready", "slots": 8, "running": 2,
        "owned": 2, "tokens_per_s": 41.5, "kv_usage": 0.25, "seen_s": 1.0,
    }  # fmt: skip
    return WorkerLine(**{**given, **fields})


def a_status(*workers: WorkerLine, **fields: Any) -> FleetStatus:
    queues = (QueueDepth("m", "default", waiting=3, running=2, oldest_s=75.0, front=1),)
    given = {"at_ms": 0, "workers": workers, "queues": queues, "delayed": 4, "dead": 0}
    return FleetStatus(**{**given, **fields})


def drawn(status: FleetStatus | None, **fields: Any) -> Parsed:
    given: dict[str, Any] = {"samples": [], "running": [], "span_s": 600.0, **fields}
    return Parsed(fragment(status, given.pop("samples"), given.pop("running"), **given))


def test_workers_queues_and_totals_are_on_the_page() -> None:
    page = drawn(a_status(a_worker()))
    for text in ("42", "2/8", "41.5", "25%", "1 min 15 s", "w1", "default", "1 s ago"):
        assert text in page.texts, text


def test_jobs_that_wait_in_an_engine_are_no_slots_in_use() -> None:
    page = drawn(a_status(a_worker(running=10), a_worker(worker="w2", running=3)))
    assert {"8/8 +2", "3/8", "11/16 +2"} <= set(page.texts)


def test_every_name_is_a_text_whatever_is_in_it() -> None:
    plain = drawn(a_status(a_worker()), running=[a_job("m")])
    status = a_status(
        a_worker(worker=HOSTILE, model=HOSTILE, state=HOSTILE, host=HOSTILE),
        queues=(QueueDepth(HOSTILE, HOSTILE, waiting=3, running=2, oldest_s=75.0),),
    )
    hostile = drawn(status, running=[a_job(HOSTILE)], trouble=HOSTILE)
    assert hostile.count("script") == hostile.count("img") == 0
    assert len(hostile.elements) == len(plain.elements) + 1, "but for the line about trouble"
    assert hostile.texts.count(HOSTILE) == 9


def a_job(text: str) -> RunningJob:
    return RunningJob(text, text, "default", text, attempt=1, offset=5, age_s=2.0)


def test_what_is_not_known_is_a_dash_and_what_is_wrong_is_said() -> None:
    worker = a_worker(tokens_per_s=None, kv_usage=None, seen_s=14.0)
    page = drawn(a_status(worker, dead=2, queues=(QueueDepth("m", "batch", paused=True),)))
    assert page.texts.count("–") == 3
    for text in ("not heard of", "paused"):
        assert text in page.texts
    unserved = drawn(a_status(worker, queues=(QueueDepth("other", "batch", waiting=1),)))
    assert "no worker" in unserved.texts
    assert ("li", {"class": "alert"}) in page.elements
    assert "No worker is running. Jobs wait for one." in drawn(a_status()).texts
    assert "looking for the fleet ..." in drawn(None).texts


def test_a_page_says_when_it_leaves_jobs_out() -> None:
    status = a_status(a_worker(), queues=(QueueDepth("m", "default", running=21),))
    shown = drawn(status, running=[a_job(str(n)) for n in range(20)])
    assert "the 20 oldest of 21" in shown.texts
    ended_meanwhile = drawn(status, running=[a_job("1")])
    assert not any("oldest of" in text for text in ended_meanwhile.texts)


def test_a_plot_says_in_words_what_it_shows_and_leaves_gaps() -> None:
    points = [(60.0, 10.0), (58.0, 30.0), (20.0, 5.0), (0.0, 20.0)]
    page = Parsed(plot("Pace", "tokens", [Series("pace", "one", points)], 120.0))
    (svg,) = (attributes for tag, attributes in page.elements if tag == "svg")
    assert svg["aria-label"] == "Pace over the last 2 minutes: pace 20 tokens now, at most 30"
    lines = [attributes["d"] for tag, attributes in page.elements if tag == "path"]
    assert lines == ["M500.0,75.0L516.7,25.0", "M833.3,87.5L833.3,87.5", "M1000.0,50.0L1000.0,50.0"]
    assert [text for text in page.texts if text.strip()] == [
        *("Pace", "40", "20", "0", "2 min ago", "60 s ago", "now")
    ]


@pytest.mark.parametrize(
    ("most", "top"), [(0, 2), (1.5, 2), (2.1, 4), (9, 10), (10, 10), (61, 80), (1001, 2000)]
)
def test_an_axis_ends_at_a_round_number_above_everything(most: float, top: float) -> None:
    assert ceiling(most) == top


def test_numbers_on_an_axis_are_short() -> None:
    assert [short(v) for v in (0.0, 7.5, 200, 1500, 20_000, 4e6)] == [
        *("0", "7.5", "200", "1.5k", "20k", "4M")
    ]


async def test_trouble_is_shown_and_what_was_seen_before_stays() -> None:
    class Fleet:
        gone = False

        async def status(self) -> FleetStatus:
            if self.gone:
                raise BrokerUnavailable("not reached")
            return a_status(a_worker())

        async def running(self, limit: int) -> list[RunningJob]:
            return [a_job("j")][:limit]

    now, fleet = [0.0], Fleet()
    sampler = Sampler(fleet, history_s=4.0, clock=lambda: now[0])  # type: ignore[arg-type]  # what it asks for
    await sampler.look()
    fleet.gone, now[0] = True, 2.0
    await sampler.look()
    assert "not reached" in (sampler.trouble or "")
    assert sampler.status is not None
    assert sampler.samples() == [(2.0, 41.5, 2, 3)]
    fleet.gone = False
    for _ in range(5):
        now[0] += 2.0
        await sampler.look()
    assert sampler.trouble is None
    assert [ago for ago, *_ in sampler.samples()] == [4.0, 2.0, 0.0], "no more than the plots show"


@pytest.fixture
async def viewer(gateway: Any, keys: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The operator's browser."""
    auth = ("anyone", keys.operator)
    async with httpx.AsyncClient(base_url=gateway.url, auth=auth, timeout=240) as viewer:
        yield viewer


async def test_the_page_stands_alone_and_runs_its_own_script_only(
    viewer: httpx.AsyncClient,
) -> None:
    answer = await viewer.get("/status")
    assert answer.status_code == 200
    page = Parsed(answer.text)
    for tag, attributes in page.elements:
        for name in ("src", "href"):
            assert str(attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
    policy = answer.headers["content-security-policy"]
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    part = Parsed((await viewer.get("/status/fragment")).text)
    assert part.count("section") == page.count("section") == 5


def test_the_page_is_for_keys_that_may_see_it(gateway: Any, keys: Any) -> None:
    bearer = {"authorization": f"Bearer {keys.operator}"}
    with httpx.Client(base_url=gateway.url, timeout=240) as web:
        for path in ("/status", "/status/fragment", "/status/data"):
            asked = web.get(path)
            assert asked.status_code == 401
            assert asked.headers["www-authenticate"].startswith("Basic ")
            assert web.get(path, auth=("x", "wrong")).status_code == 401
            assert web.get(path, auth=("x", keys.alice)).status_code == 403
            assert web.get(path, headers=bearer).status_code == 200


async def test_the_data_names_the_fleet_and_the_jobs_but_none_of_their_words(
    viewer: httpx.AsyncClient, gateway_server: EmbeddedServer, worker: Any, tools: Any
) -> None:
    queue = JobQueue(
        gateway_server.url,
        namespace=tools.NAMESPACE,
        model_name="shown",
        worker_id="shower",
        lease_s=30.0,
    )
    async with aclosing(queue):
        await queue.heartbeat({"host": HOSTILE, "slots": 3}, ttl_s=3600.0)
        while True:
            found = (await viewer.get("/status/data")).json()
            lines = {
                line["worker"]: line for line in (found["status"] or {"workers": []})["workers"]
            }
            if {"shower"} <= lines.keys() and found["samples"]:
                break
        assert lines["shower"]["slots"] == 3
        assert any(line["model"] == tools.MODEL and line["slots"] == 16 for line in lines.values())
        assert found["trouble"] is None
        page = Parsed((await viewer.get("/status")).text)
        assert "shower" in page.texts
        assert page.count("img") == 0
        await queue.leave()


async def test_there_is_no_page_where_the_settings_say_so() -> None:
    def paths(**settings: Any) -> set[str]:
        return {route.path for route in create_app(GatewaySettings(**settings)).routes}  # type: ignore[attr-defined]  # all are Routes

    assert paths() - paths(status_page=False) == {"/status", "/status/fragment", "/status/data"}
