"""The text that /metrics serves, made from the same instruments that OTLP exports.

A dot in a name becomes an underscore, seconds get their suffix, counters end in _total: what the
OpenTelemetry collector would make of them. With `vllm_names` the figures that vLLM's dashboards
draw are offered a second time under the names they know; the first spelling is always there.

A scraper that asks for OpenMetrics also gets exemplars: of each latency bucket, the trace of a job.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    NumberDataPoint,
    Sum,
)
from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from tokenfleet.producer import semconv

OPENMETRICS = "application/openmetrics-text"

VLLM_NAMES = {
    semconv.SEQUENCES_RUNNING: ("vllm:num_requests_running",),
    semconv.SEQUENCES_WAITING: ("vllm:num_requests_waiting",),
    semconv.KV_CACHE_USAGE: ("vllm:kv_cache_usage_perc",),
    semconv.PREFIX_CACHE_QUERIES: ("vllm:prefix_cache_queries",),
    semconv.PREFIX_CACHE_HITS: ("vllm:prefix_cache_hits",),
    semconv.PREEMPTIONS: ("vllm:num_preemptions",),
    semconv.PREFILL_TOKENS: ("vllm:prompt_tokens",),
    semconv.DECODE_TOKENS: ("vllm:generation_tokens",),
    semconv.TIME_TO_FIRST_TOKEN: ("vllm:time_to_first_token_seconds",),
    semconv.TIME_PER_OUTPUT_TOKEN: (
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    semconv.REQUEST_DURATION: ("vllm:e2e_request_latency_seconds",),
    semconv.QUEUE_WAIT: ("vllm:request_queue_time_seconds",),
    semconv.CHOICES_ENDED: ("vllm:request_success",),
    semconv.JOB_PROMPT_TOKENS: ("vllm:request_prompt_tokens",),
    semconv.JOB_OUTPUT_TOKENS: ("vllm:request_generation_tokens",),
}
VLLM_LABELS = {semconv.FINISH_REASON: "finished_reason"}
"""Labels that are called otherwise there."""


class Scrape(Collector):
    """Renders what a metric reader collects. One instance per process."""

    def __init__(self, reader: InMemoryMetricReader, model: str, *, vllm_names: bool) -> None:
        self._reader = reader
        self._model = model
        self._vllm_names = vllm_names
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body, in the format that the Accept header asks for."""
        _, content_type = choose_encoder(accept)
        if content_type.startswith(OPENMETRICS):
            # our names are valid as they are; "underscores" would take the colon out of vLLM's
            body: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]  # not typed there
                self._registry, escaping=openmetrics.ALLOWUTF8
            )
            return f"{OPENMETRICS}; version=1.0.0; charset=utf-8", body
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)

    def describe(self) -> Iterable[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for metric in self._collected():
            yield _family(_prometheus_name(metric), metric)
            for name in VLLM_NAMES.get(metric.name, ()) if self._vllm_names else ():
                yield _family(name, metric, VLLM_LABELS, {"model_name": self._model})

    def _collected(self) -> Iterator[Metric]:
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                yield from scope.metrics


def _prometheus_name(metric: Metric) -> str:
    name = metric.name.replace(".", "_")
    return f"{name}_seconds" if metric.unit == "s" else name


def _family(
    name: str,
    metric: Metric,
    renamed: Mapping[str, str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> Family:
    """One family with one row a point;

    a label that a point lacks is empty, as Prometheus reads it.
    """
    points: list[NumberDataPoint | HistogramDataPoint] = [*metric.data.data_points]
    labels = [
        {**_labels(point.attributes or {}, renamed or {}), **(extra or {})} for point in points
    ]
    keys = sorted({key for row in labels for key in row})
    family = _empty(name, metric, keys)
    for point, row in zip(points, labels, strict=True):
        values = [row.get(key, "") for key in keys]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(point, HistogramDataPoint)
            family.add_metric(values, _buckets(point), point.sum)
        else:
            assert isinstance(point, NumberDataPoint)
            family.add_metric(values, point.value)
    return family


def _empty(
    name: str, metric: Metric, keys: Sequence[str]
) -> HistogramMetricFamily | CounterMetricFamily | GaugeMetricFamily:
    text = metric.description or name
    if isinstance(metric.data, Histogram):
        return HistogramMetricFamily(name, text, labels=keys)
    if isinstance(metric.data, Sum):
        return CounterMetricFamily(name, text, labels=keys)
    return GaugeMetricFamily(name, text, labels=keys)


def _labels(attributes: Mapping[str, object], renamed: Mapping[str, str]) -> dict[str, str]:
    return {
        renamed.get(key, key).replace(".", "_"): str(value) for key, value in attributes.items()
    }


def _buckets(
    point: HistogramDataPoint,
) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Cumulative counts by upper bound, with the trace of a job that fell into the bucket."""
    bounds = [*(str(float(bound)) for bound in point.explicit_bounds), "+Inf"]
    seen = {bisect_left(point.explicit_bounds, e.value): _exemplar(e) for e in _traced(point)}
    rows: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    for number, (bound, count) in enumerate(
        zip(bounds, accumulate(point.bucket_counts), strict=True)
    ):
        exemplar = seen.get(number)
        rows.append((bound, count) if exemplar is None else (bound, count, exemplar))
    return rows


def _traced(point: HistogramDataPoint) -> Iterator[SdkExemplar]:
    return (e for e in point.exemplars if e.trace_id is not None and e.span_id is not None)


def _exemplar(found: SdkExemplar) -> Exemplar:
    ids = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
    return Exemplar(ids, found.value, found.time_unix_nano / 1e9)
