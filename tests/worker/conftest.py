"""Real OTLP receivers, over gRPC and HTTP, and one that is a hole in the ground."""

from __future__ import annotations

import gzip
import http.server
import queue
import socket
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

WAIT_S = 240.0


class Received:
    """What a receiver was sent, as queues of requests."""

    def __init__(self) -> None:
        self.traces: queue.Queue[Any] = queue.Queue()
        self.metrics: queue.Queue[Any] = queue.Queue()
        self.endpoint = ""

    def next_spans(self) -> dict[str, Any]:
        """The spans of the next request, by name."""
        request = self.traces.get(timeout=WAIT_S)
        return {
            span.name: span
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def spans(self, *names: str) -> dict[str, Any]:
        """All spans up to and with these, in however many requests they come."""
        found: dict[str, Any] = {}
        while not set(names) <= found.keys():
            found |= self.next_spans()
        return found

    def span_names(self) -> set[str]:
        return set(self.next_spans())

    def metric_names(self) -> set[str]:
        request = self.metrics.get(timeout=WAIT_S)
        return {
            metric.name
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def wait_for_metric(self, name: str) -> None:
        while name not in self.metric_names():
            pass


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
    """A collector that accepts connections and never says a word. No thread of an exporter that
    waits for it outlives the test: what it does later would be another test's."""
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread
