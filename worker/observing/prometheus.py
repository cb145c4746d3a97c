"""The text that /metrics serves, made from the same instruments that OTLP exports.

A dot in a name becomes an underscore, seconds get their suffix, counters end in _total: what the
OpenTelemetry collector would make of them. With `vllm_names` the figures that vLLM's dashboards
draw are offered a second time under the names they know; the first spelling is always there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

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
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from tokenfleet.producer import semconv

CONTENT_TYPE = CONTENT_TYPE_LATEST

VLLM_NAMES = {
    semconv.SEQUENCES_RUNNING: "vllm:num_requests_running",
    semconv.SEQUENCES_WAITING: "vllm:num_requests_waiting",
    semconv.KV_CACHE_USAGE: "vllm:kv_cache_usage_perc",
    semconv.PREFIX_CACHE_QUERIES: "vllm:prefix_cache_queries",
    semconv.PREFIX_CACHE_HITS: "vllm:prefix_cache_hits",
    semconv.PREEMPTIONS: "vllm:num_preemptions",
    semconv.PREFILL_TOKENS: "vllm:prompt_tokens",
    semconv.DECODE_TOKENS: "vllm:generation_tokens",
    semconv.TIME_TO_FIRST_TOKEN: "vllm:time_to_first_token_seconds",
    semconv.TIME_PER_OUTPUT_TOKEN: "vllm:inter_token_latency_seconds",
    semconv.REQUEST_DURATION: "vllm:e2e_request_latency_seconds",
    semconv.QUEUE_WAIT: "vllm:request_queue_time_seconds",
}


class Scrape(Collector):
    """Renders what a metric reader collects. One instance per process."""

    def __init__(self, reader: InMemoryMetricReader, model: str, *, vllm_names: bool) -> None:
        self._reader = reader
        self._model = model
        self._vllm_names = vllm_names
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for metric in self._collected():
            yield _family(_prometheus_name(metric), metric, {})
            if self._vllm_names and metric.name in VLLM_NAMES:
                yield _family(VLLM_NAMES[metric.name], metric, {"model_name": self._model})

    def _collected(self) -> Iterator[Metric]:
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                yield from scope.metrics


def _prometheus_name(metric: Metric) -> str:
    name = metric.name.replace(".", "_")
    return f"{name}_seconds" if metric.unit == "s" else name


def _family(name: str, metric: Metric, extra: Mapping[str, str]) -> Family:
    """One family with one row a point;

    a label that a point lacks is empty, as Prometheus reads it.
    """
    points: list[NumberDataPoint | HistogramDataPoint] = [*metric.data.data_points]
    labels = [{**_labels(point.attributes or {}), **extra} for point in points]
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


def _labels(attributes: Mapping[str, object]) -> dict[str, str]:
    return {key.replace(".", "_"): str(value) for key, value in attributes.items()}


def _buckets(point: HistogramDataPoint) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as the text format has them."""
    bounds = [*(str(float(bound)) for bound in point.explicit_bounds), "+Inf"]
    return list(zip(bounds, accumulate(point.bucket_counts), strict=True))
