"""Where spans and metrics leave the process: OTLP, a file of JSON lines, the console.

Nothing here may slow a job or hold up an exit: spans wait in bounded queues that drop the oldest
when full, every export has a short timeout, and `shutdown` gives up after the seconds it is told.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased

from tokenfleet.producer import semconv
from tokenfleet.worker.observing.trace_sampling import FollowsLink

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

EXPORT_TIMEOUT_S = 3.0
QUEUE_SPANS = 4096
"""Ended spans that wait for an export; beyond it the oldest are dropped."""
OTLP_DELAY_MS = 1000.0
FILE_DELAY_MS = 100.0
METRIC_INTERVAL_MS = 15_000.0
PROTOCOLS = ("grpc", "http")


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """Where to; all unset means that spans are made for nobody and metrics are only scraped."""

    service: str = "tokenfleet-worker"
    instance: str = ""
    """Which process this is: the worker id."""
    version: str = ""
    otlp_endpoint: str | None = None
    """Base URL of a collector (http://host:4317 for gRPC, http://host:4318 for HTTP)."""
    otlp_protocol: str = "grpc"
    trace_file: Path | None = None
    """Spans are appended here, one JSON object a line; several processes may share the file."""
    console: bool = False

    @property
    def exports_spans(self) -> bool:
        """Whether spans go anywhere."""
        return bool(self.otlp_endpoint or self.trace_file or self.console)


class JsonLinesExporter(SpanExporter):
    """Appends one JSON object per span to a file; a line is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            os.write(self._fd, (json.dumps(span_as_dict(span)) + "\n").encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ConsoleLinesExporter(SpanExporter):
    """The same lines on standard error, where they do not mix with what a command prints."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            sys.stderr.write(json.dumps(span_as_dict(span)) + "\n")
        sys.stderr.flush()
        return SpanExportResult.SUCCESS


def span_as_dict(span: ReadableSpan) -> dict[str, object]:
    """A span for people and for `jq`: ids in hex, times in Unix seconds, empty parts left out."""
    context = span.get_span_context()
    start, end = span.start_time or 0, span.end_time or 0
    described: dict[str, object] = {
        "name": span.name,
        "kind": span.kind.name,
        "trace_id": f"{context.trace_id:032x}" if context else None,
        "span_id": f"{context.span_id:016x}" if context else None,
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "start_s": start / 1e9,
        "duration_s": (end - start) / 1e9,
        "status": span.status.status_code.name,
        "status_message": span.status.description,
        "attributes": _plain(span.attributes),
        "events": [
            {
                "name": e.name,
                "at_s": (e.timestamp - start) / 1e9,
                "attributes": _plain(e.attributes),
            }
            for e in span.events
        ],
        "links": [
            {"trace_id": f"{k.context.trace_id:032x}", "span_id": f"{k.context.span_id:016x}"}
            for k in span.links
        ],
        "service": span.resource.attributes.get(semconv.SERVICE_NAME),
        "instance": span.resource.attributes.get(semconv.SERVICE_INSTANCE_ID),
    }
    return {name: value for name, value in described.items() if value not in (None, [], {})}


def _plain(attributes: Mapping[str, object] | None) -> dict[str, object]:
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in (attributes or {}).items()
    }


def _otlp_span_exporter(config: ExportConfig) -> SpanExporter:
    base = (config.otlp_endpoint or "").rstrip("/")
    if config.otlp_protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=f"{base}/v1/traces", timeout=EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

    return Grpc(endpoint=base, insecure=not base.startswith("https"), timeout=EXPORT_TIMEOUT_S)


def _otlp_metric_exporter(config: ExportConfig) -> MetricExporter:
    base = (config.otlp_endpoint or "").rstrip("/")
    if config.otlp_protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
            OTLPMetricExporter as Http,
        )

        return Http(endpoint=f"{base}/v1/metrics", timeout=EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

    return Grpc(endpoint=base, insecure=not base.startswith("https"), timeout=EXPORT_TIMEOUT_S)


class Exporters:
    """The providers of one process and their way out.

    Raises:
        ValueError: an unknown protocol, or an endpoint without a scheme.
    """

    def __init__(
        self,
        config: ExportConfig,
        *,
        root_sampler: Sampler | None = None,
        metric_interval_ms: float = METRIC_INTERVAL_MS,
    ) -> None:
        _check(config)
        resource = Resource.create(
            {
                semconv.SERVICE_NAME: config.service,
                semconv.SERVICE_INSTANCE_ID: config.instance,
                semconv.SERVICE_VERSION: config.version,
            }
        )
        self.tracer_provider = TracerProvider(
            resource=resource,
            sampler=ParentBased(FollowsLink(root_sampler)),
            shutdown_on_exit=False,
        )
        for exporter, delay_ms in _span_exporters(config):
            self.tracer_provider.add_span_processor(
                BatchSpanProcessor(
                    exporter, max_queue_size=QUEUE_SPANS, schedule_delay_millis=delay_ms
                )
            )
        self.scrape = InMemoryMetricReader()
        readers: list[MetricReader] = [self.scrape]
        if config.otlp_endpoint:
            readers.append(
                PeriodicExportingMetricReader(
                    _otlp_metric_exporter(config),
                    export_interval_millis=metric_interval_ms,
                    export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
                )
            )
        self.meter_provider = MeterProvider(
            metric_readers=readers, resource=resource, shutdown_on_exit=False
        )

    def shutdown(self, timeout_s: float) -> bool:
        """Send what waits, for at most `timeout_s`; False when it gave up. Safe to call again."""
        threads = [
            threading.Thread(target=provider.shutdown, name="telemetry-shutdown", daemon=True)
            for provider in (self.tracer_provider, self.meter_provider)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def _check(config: ExportConfig) -> None:
    if config.otlp_protocol not in PROTOCOLS:
        raise ValueError(f"otlp_protocol must be one of {PROTOCOLS}, got {config.otlp_protocol!r}")
    if config.otlp_endpoint and not config.otlp_endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"otlp_endpoint must be a URL like http://localhost:4317, got {config.otlp_endpoint!r}"
        )


def _span_exporters(config: ExportConfig) -> list[tuple[SpanExporter, float]]:
    exporters: list[tuple[SpanExporter, float]] = []
    if config.trace_file is not None:
        exporters.append((JsonLinesExporter(config.trace_file), FILE_DELAY_MS))
    if config.console:
        exporters.append((ConsoleLinesExporter(), FILE_DELAY_MS))
    if config.otlp_endpoint:  # last: the others are written before a dead collector is waited for
        exporters.append((_otlp_span_exporter(config), OTLP_DELAY_MS))
    return exporters
