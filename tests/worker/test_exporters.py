"""OTLP as real receivers get it, and what happens when the receiver is a hole in the ground."""

from __future__ import annotations

import gzip
import http.server
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tokenfleet.worker.exporters import QUEUE_SPANS, ExportConfig, Exporters

WAIT_S = 20.0


class Received:
    """What a receiver was sent, as queues of requests."""

    def __init__(self) -> None:
        self.traces: queue.Queue[Any] = queue.Queue()
        self.metrics: queue.Queue[Any] = queue.Queue()
        self.endpoint = ""

    def span_names(self) -> set[str]:
        request = self.traces.get(timeout=WAIT_S)
        return {
            span.name
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def metric_names(self) -> set[str]:
        request = self.metrics.get(timeout=WAIT_S)
        return {
            metric.name
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:
        self._received.traces.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:
        self._received.metrics.put(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.fixture
def grpc_receiver() -> Iterator[Received]:
    received = Received()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(received), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(received), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    received.endpoint = f"http://127.0.0.1:{port}"
    yield received
    server.stop(0).wait()


@pytest.fixture
def http_receiver() -> Iterator[Received]:
    received = Received()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                traces = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                received.traces.put(traces)
            elif self.path == "/v1/metrics":
                metrics = metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
                received.metrics.put(metrics)
            self.send_response(200 if self.path.startswith("/v1/") else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    received.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A collector that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_spans_and_metrics_arrive_over_otlp(protocol: str, request: Any) -> None:
    received: Received = request.getfixturevalue(f"{protocol}_receiver")
    exporters = Exporters(
        ExportConfig(instance="w1", otlp_endpoint=received.endpoint + "/", otlp_protocol=protocol)
    )
    exporters.meter_provider.get_meter("test").create_counter("tokens").add(1)
    exporters.tracer_provider.get_tracer("test").start_span("chat smollm2").end()
    assert exporters.shutdown(WAIT_S)
    assert received.span_names() == {"chat smollm2"}
    assert received.metric_names() == {"tokens"}


def test_metrics_are_sent_at_intervals_without_a_shutdown(grpc_receiver: Received) -> None:
    exporters = Exporters(
        ExportConfig(otlp_endpoint=grpc_receiver.endpoint), metric_interval_ms=20.0
    )
    exporters.meter_provider.get_meter("test").create_counter("tokens").add(1)
    assert "tokens" in grpc_receiver.metric_names()
    assert exporters.shutdown(WAIT_S)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_black_hole_neither_slows_spans_nor_delays_the_shutdown(
    protocol: str, black_hole: str
) -> None:
    exporters = Exporters(ExportConfig(otlp_endpoint=black_hole, otlp_protocol=protocol))
    tracer = exporters.tracer_provider.get_tracer("test")
    for _ in range(5 * QUEUE_SPANS):  # were one of them to wait for room, it would wait for ever
        tracer.start_span("chat smollm2").end()
    assert exporters.shutdown(0.5) is False, "it gave up, with the export still under way"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_process_with_a_black_hole_still_exits(protocol: str, black_hole: str) -> None:
    script = (
        "import time\n"
        "from tokenfleet.worker.exporters import ExportConfig, Exporters\n"
        f"e = Exporters(ExportConfig(otlp_endpoint={black_hole!r}, otlp_protocol={protocol!r}))\n"
        "e.tracer_provider.get_tracer('test').start_span('x').end()\n"
        "e.meter_provider.get_meter('test').create_counter('c').add(1)\n"
        "time.sleep(1.2)\n"  # an export is under way
        "print(e.shutdown(0.5), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_a_file_is_written_although_the_collector_is_away(tmp_path: Any, black_hole: str) -> None:
    path = tmp_path / "trace.jsonl"
    exporters = Exporters(ExportConfig(otlp_endpoint=black_hole, trace_file=path))
    exporters.tracer_provider.get_tracer("test").start_span("chat smollm2").end()
    exporters.shutdown(1.0)
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ExportConfig(otlp_protocol="udp"), "otlp_protocol must be one of .*'udp'"),
        (ExportConfig(otlp_endpoint="collector:4317"), "otlp_endpoint must be a URL"),
    ],
)
def test_a_wrong_destination_is_refused_at_the_start(config: ExportConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exporters(config)
