"""One trace from the producer to the last token, through a real worker and over OTLP."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tokenfleet.producer import AsyncClient, SamplingParams, semconv
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.worker.demo.worker_process import WorkerProcess


@pytest.fixture
def worker_of(tmp_path: Path, byte_tokenizer: Path) -> Callable[..., WorkerProcess]:
    def make(server: EmbeddedServer, **settings: object) -> WorkerProcess:
        return WorkerProcess(
            "w1",
            {
                "redis_url": server.url,
                "model": byte_tokenizer,
                "model_name": "echo",
                "simulated_step_ms": 2,
                **settings,
            },
            tmp_path / "worker.log",
        )

    return make


@contextmanager
def a_request(name: str) -> Iterator[str]:
    """A span as a backend service has one around its work; its trace id."""
    provider = TracerProvider(shutdown_on_exit=False)
    with provider.get_tracer("backend").start_as_current_span(name) as span:
        yield f"{span.get_span_context().trace_id:032x}"
    provider.shutdown()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_jobs_trace_goes_from_the_producer_to_its_last_token(
    protocol: str, request: Any, worker_of: Any
) -> None:
    received = request.getfixturevalue(f"{protocol}_receiver")
    with EmbeddedServer() as server:
        worker = worker_of(server, otlp_endpoint=received.endpoint, otlp_protocol=protocol)
        await worker.start()
        async with AsyncClient(server.url) as client:
            with a_request("handle") as trace_id:
                job = await client.submit(
                    model="echo",
                    messages=[{"role": "user", "content": "hi"}],
                    sampling=SamplingParams(max_tokens=5),
                )
                sender = trace.get_current_span().get_span_context().span_id
            await job.result(timeout_s=240)
        names = ("process echo:default", "chat echo")
        spans = await asyncio.to_thread(received.spans, *names)
        assert await worker.stop(240.0) == 0
    process, chat = (spans[name] for name in names)
    assert process.trace_id.hex() == chat.trace_id.hex() == trace_id
    assert process.parent_span_id.hex() == f"{sender:016x}", "no SDK here: send makes no span"
    assert chat.parent_span_id == process.span_id
    assert [event.name for event in chat.events] == ["claimed", "first_token"]
    attributes = {pair.key: pair.value for pair in chat.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    received.wait_for_metric("gen_ai.server.time_to_first_token")


PRODUCER = """
import sys
from opentelemetry import trace
from tokenfleet.producer import Client, SamplingParams
from tokenfleet.worker.observing.exporters import ExportConfig, Exporters

exporters = Exporters(ExportConfig(service="backend", otlp_endpoint=sys.argv[2]))
trace.set_tracer_provider(exporters.tracer_provider)
with trace.get_tracer("backend").start_as_current_span("handle") as span:
    with Client(sys.argv[1], tenant="acme") as client:
        job = client.submit(
            model="echo", messages=[{"role": "user", "content": "hi"}], priority="interactive",
            sampling=SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, seed=7),
        )
        job.result(timeout_s=240)
print(job.id, f"{span.get_span_context().trace_id:032x}")
assert exporters.shutdown(20)
"""


async def test_one_trace_holds_request_send_process_and_chat_as_documented(
    grpc_receiver: Any, worker_of: Any
) -> None:
    with EmbeddedServer() as server:
        worker = worker_of(server, otlp_endpoint=grpc_receiver.endpoint)
        await worker.start()
        await worker.ready()
        producer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PRODUCER, server.url, grpc_receiver.endpoint, stdout=PIPE
        )
        said, _ = await producer.communicate()
        assert producer.returncode == 0
        job_id, trace_id = said.decode().split()
        page = await asyncio.to_thread(scraped, worker.health_port)
        names = ("handle", "send echo:interactive", "process echo:interactive", "chat echo")
        spans = await asyncio.to_thread(grpc_receiver.spans, *names)
        assert await worker.stop(240.0) == 0
    arrived: set[str] = set()
    while not grpc_receiver.metrics.empty():
        arrived |= grpc_receiver.metric_names()
    named = (value for value in vars(semconv).values() if isinstance(value, str))
    ours = {name for name in named if name.startswith(("tokenfleet_", "gen_ai.server."))}
    workers = {name for name in ours if not name.startswith("tokenfleet_gateway_")}
    assert workers <= arrived, "every metric of a worker went over OTLP as well"
    handle, send, process, chat = (spans[name] for name in names)
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    chain = [(child.parent_span_id, parent.span_id) for parent, child in (
        (handle, send), (send, process), (process, chat),
    )]  # fmt: skip
    assert all(found == expected for found, expected in chain)
    assert (send.kind, process.kind, chat.kind) == (4, 5, 1), "PRODUCER, CONSUMER, INTERNAL"
    for span in (send, process):
        assert values(span)["messaging.message.id"] == job_id
        assert values(span)["messaging.destination.name"] == "echo:interactive"
    assert values(process)["tokenfleet.job.tenant"] == "acme"
    assert values(process)["tokenfleet.job.state"] == "finished"
    said_of_chat = values(chat)
    assert said_of_chat["gen_ai.request.seed"] == 7
    assert said_of_chat["gen_ai.request.temperature"] == 0.5
    assert said_of_chat["gen_ai.usage.output_tokens"] == 5
    assert said_of_chat["gen_ai.response.id"] == job_id
    known = {value for value in vars(semconv).values() if isinstance(value, str)}
    for span in (send, process, chat):
        assert values(span).keys() <= known
    traced = {
        sample.exemplar.labels["trace_id"]
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.exemplar
    }
    assert traced == {trace_id}, "a scrape leads to the trace as well"
    assert "acme" not in page
    assert job_id not in page
    lines = [json.loads(x) for x in worker.log.read_text().splitlines() if x.startswith("{")]
    about = [line for line in lines if line.get("job_id") == job_id]
    assert {line["event"] for line in about} >= {"job_claimed", "job_ended"}
    assert {line["trace_id"] for line in about} == {trace_id}, "and so does the log"


def values(span: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        found[pair.key] = getattr(pair.value, kind)
    return found


def scraped(port: int) -> str:
    """The page as a Prometheus server asks for it."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics",
        headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"},
    )
    with urllib.request.urlopen(request, timeout=240) as reply:
        return str(reply.read().decode())


async def test_the_jobs_of_a_batch_link_to_their_producer(
    grpc_receiver: Any, worker_of: Any
) -> None:
    with EmbeddedServer() as server:
        worker = worker_of(server, otlp_endpoint=grpc_receiver.endpoint)
        await worker.start()
        async with AsyncClient(server.url) as client:
            with a_request("handle") as trace_id:
                one = {"model": "echo", "prompt": "hi", "sampling": SamplingParams(max_tokens=2)}
                (job,) = await client.submit_many([one])
            await job.result(timeout_s=240)
        spans = await asyncio.to_thread(grpc_receiver.spans, "process echo:default")
        assert await worker.stop(240.0) == 0
    process = spans["process echo:default"]
    assert process.trace_id.hex() != trace_id
    assert [link.trace_id.hex() for link in process.links] == [trace_id]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_worker_with_a_dead_collector_serves_and_ends_as_ever(
    protocol: str, black_hole: str, worker_of: Any
) -> None:
    with EmbeddedServer() as server:
        worker = worker_of(server, otlp_endpoint=black_hole, otlp_protocol=protocol, grace_s=1)
        await worker.start()
        async with AsyncClient(server.url) as client:
            sampling = SamplingParams(max_tokens=200)
            jobs = await client.submit_many(
                {"model": "echo", "prompt": "hi", "sampling": sampling} for _ in range(20)
            )
            for job in jobs:
                assert (await job.result(timeout_s=240)).usage.completion_tokens == 200
        assert await worker.stop(patience_s=240.0) == 0, "it ended by itself, and not by SIGKILL"
