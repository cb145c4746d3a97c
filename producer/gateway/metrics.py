"""What a gateway counts; /metrics shows it.

The worker's metrics tell of jobs; these tell of requests, and of what the gateway itself adds to
them. Names stand in producer/semconv.py, for people in ops/telemetry.md.

Invariant: no label grows with the load: routes as they are written in app.py, and statuses. No
model, tenant or key, which would also be nobody's business.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from starlette.routing import BaseRoute, Route

from tokenfleet.producer import semconv

LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
ADDED_BUCKETS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 1.0)
ELSEWHERE = "other"
"""The route of a request that led nowhere."""
MAIN_ROUTES = ("/v1/chat/completions", "/v1/completions")
RARE = (200, 429, 499, 500, 503)
"""Statuses of the main routes that are shown before they happen: only what grows is seen."""

# a second series for each counter, which nothing reads; the call has no types
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Passage:
    """When a request came by where; monotonic seconds, None: it has not, or never will."""

    began: float
    submitted_at: float | None = None
    """Its job was in the queue."""
    first_token_at: float | None = None
    """A stream's first token reached the gateway."""
    first_sent_at: float | None = None
    """And had been sent on."""


class GatewayMetrics:
    """The instruments of one gateway.

    Args:
        routes: those of the application; anything else is counted as `other`.
        clock: monotonic seconds.
    """

    def __init__(
        self, routes: list[BaseRoute], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self._paths = {
            route.endpoint: re.sub(r":\w+}", "}", route.path)
            for route in routes
            if isinstance(route, Route)
        }
        self._registry = CollectorRegistry()
        self._requests = Counter(
            semconv.GATEWAY_REQUESTS,
            "Requests that were answered, by route and status; 499: the client had gone.",
            (semconv.ROUTE, semconv.STATUS),
            registry=self._registry,
        )
        self._duration = Histogram(
            semconv.GATEWAY_REQUEST_DURATION,
            "From a request's first line to the end of its answer.",
            (semconv.ROUTE,),
            registry=self._registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self._first_token = Histogram(
            semconv.GATEWAY_FIRST_TOKEN,
            "Of streams: from the request's first line to its first token written out.",
            registry=self._registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self._added = Histogram(
            semconv.GATEWAY_FIRST_TOKEN_ADDED,
            "What of it is the gateway: until the job is queued, and from the token's arrival on.",
            registry=self._registry,
            buckets=ADDED_BUCKETS_S,
        )
        self.running = Gauge(
            semconv.GATEWAY_REQUESTS_RUNNING,
            "Requests that are being answered.",
            registry=self._registry,
        )
        self.streams = Gauge(
            semconv.GATEWAY_STREAMS_OPEN,
            "Of those, event streams that are open.",
            registry=self._registry,
        )
        self.gone = Counter(
            semconv.GATEWAY_READERS_GONE,
            "Requests whose client closed the connection before the end of the answer.",
            registry=self._registry,
        )
        for route in MAIN_ROUTES:
            for status in RARE:
                self._requests.labels(route, status)

    def answered(self, endpoint: Any, status: int, passage: Passage) -> None:
        """A request has ended."""
        route = self._paths.get(endpoint, ELSEWHERE)
        self._requests.labels(route, status).inc()
        self._duration.labels(route).observe(self.clock() - passage.began)

    def first_sent(self, passage: Passage) -> None:
        """A stream's first token has been written out."""
        passage.first_sent_at = now = self.clock()
        if passage.submitted_at is None or passage.first_token_at is None:
            return  # somebody who reads again: the token may have been there for long
        self._first_token.observe(now - passage.began)
        before = passage.submitted_at - passage.began
        self._added.observe(before + now - passage.first_token_at)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body, in the format that the Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)

    def kinds(self) -> Mapping[str, str]:
        """Name -> counter, gauge or histogram, for the page that lists them."""
        return {family.name: family.type for family in self._registry.collect()}
