"""The probes, over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenfleet.producer.embedded import hold_port
from tokenfleet.worker.health import HealthServer


async def ask(port: int, request: str) -> tuple[int, str]:
    """Status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    reply = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = reply.partition("\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


async def get(port: int, path: str) -> tuple[int, str]:
    return await ask(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_ready_follows_engine_registration_and_drain(fleet, until) -> None:
    fleet.engine_may_start = asyncio.Event()
    port = hold_port(fleet)
    worker = fleet.worker(health_port=port, grace_s=3600)

    async def answer(path: str) -> Any:
        try:
            return await get(port, path)
        except OSError:
            return None

    assert await until(lambda: answer("/healthz")) == (200, "ok\n")
    status, reasons = await get(port, "/readyz")
    assert status == 503
    assert "the engine is starting" in reasons
    fleet.engine_may_start.set()
    await until(lambda: _is(answer("/readyz"), (200, "ready\n")))
    status, metrics = await get(port, "/metrics")
    assert status == 200
    assert "tokenfleet" in metrics
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine_may_start.clear()
    fleet.engine.die()
    await until(lambda: _is(answer("/readyz"), (503, "the engine is starting\n")))
    fleet.engine_may_start.set()
    await until(lambda: len(fleet.engines) == 2 and fleet.has(job))
    worker.drain()
    await until(lambda: _is(answer("/readyz"), (503, "draining\n")))
    fleet.engine.say(job, "x", "stop")
    assert await fleet.runs[0] == 0


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET /nothing HTTP/1.1\r\n\r\n", 404),
        ("POST /healthz HTTP/1.1\r\n\r\n", 405),
        ("HEAD /healthz HTTP/1.1\r\n\r\n", 200),
        ("GET /healthz?verbose=1 HTTP/1.1\r\n\r\n", 200),
        ("what\r\n\r\n", 400),
        ("GET " + "x" * 20_000 + " HTTP/1.1\r\n\r\n", 0),
    ],
)
async def test_odd_requests_get_an_answer_or_nothing(request_: str, status: int) -> None:
    server = HealthServer("127.0.0.1", 0, reasons=list, metrics=lambda _: ("", b""))
    port = await server.start()
    try:
        try:
            answer, _ = await ask(port, request_)
        except ConnectionError:
            answer = 0
        assert answer == status
    finally:
        await server.stop()


async def test_the_scrapers_wish_reaches_the_page() -> None:
    server = HealthServer("127.0.0.1", 0, reasons=list, metrics=lambda a: (a, a.encode()))
    port = await server.start()
    try:
        for field in (
            "Accept: application/openmetrics-text",
            "accept:application/openmetrics-text",
        ):
            request = f"GET /metrics HTTP/1.1\r\nHost: x\r\n{field}\r\n\r\n"
            assert await ask(port, request) == (200, "application/openmetrics-text")
        assert await get(port, "/metrics") == (200, "")
    finally:
        await server.stop()


async def _is(reply: Any, expected: tuple[int, str]) -> bool:
    return await reply == expected
