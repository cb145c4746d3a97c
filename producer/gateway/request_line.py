"""What happens around every request: an id, one log line, and the counts of /metrics.

Invariant: every response carries `x-request-id`, and every request is counted once and makes one
log line, however it ends.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenfleet.producer import tracing
from tokenfleet.producer.gateway.answers import CLIENT_CLOSED, GONE, error_response
from tokenfleet.producer.gateway.metrics import GatewayMetrics, Passage

QUIET = ("/healthz", "/readyz", "/metrics", "/status/fragment", "/status/data")
"""Logged at debug only: they are asked for every few seconds."""

log = logging.getLogger(__name__)


class RequestLine:
    """Gives every request an id and notes, counts it, and writes its one log line."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HTTP alone; anything else is passed on as it is."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["notes"], state["request_id"] = {}, f"req-{uuid.uuid4()}"
        state["passage"] = passage = Passage(self._metrics.clock())
        answer = _Answer(send, state, self._metrics)
        self._metrics.running.inc()
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:  # a fault of ours: said once, and answered
            state["notes"]["error"] = "internal_error"
            log.error("request_broke", exc_info=error, extra={"fields": {"path": scope["path"]}})
            if not answer.status:
                await error_response(error)(scope, receive, answer.send)
        finally:
            self._count(scope, answer, passage)
            self._say(scope, answer.status, (self._metrics.clock() - passage.began) * 1000)

    def _count(self, scope: Scope, answer: _Answer, passage: Passage) -> None:
        self._metrics.running.dec()
        if answer.is_stream:
            self._metrics.streams.dec()
        if not answer.status or scope["state"]["notes"].get("error") == GONE:
            self._metrics.gone.inc()
        self._metrics.answered(scope.get("endpoint"), answer.status or CLIENT_CLOSED, passage)

    def _say(self, scope: Scope, code: int, took_ms: float) -> None:
        request = Request(scope)
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": code or CLIENT_CLOSED,
            "duration_ms": round(took_ms, 1),
            "request_id": scope["state"]["request_id"],
            **scope["state"]["notes"],
        }
        trace_id = tracing.trace_id_of(request.headers.get("traceparent"))
        if trace_id is not None:
            fields["trace_id"] = trace_id
        level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
        log.log(level, "request", extra={"fields": fields})


class _Answer:
    """An answer on its way out: gets its id, and is watched for its status and its first token."""

    def __init__(self, send: Send, state: Mapping[str, Any], metrics: GatewayMetrics) -> None:
        self._send = send
        self._state = state
        self._passage: Passage = state["passage"]
        self._metrics = metrics
        self.status = 0
        """0: nothing has been sent."""
        self.is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        await self._send(message)
        passage = self._passage
        waits = passage.first_token_at is not None and passage.first_sent_at is None
        if waits and message.get("body"):
            self._metrics.first_sent(passage)

    def _start(self, message: Message) -> None:
        self.status = message["status"]
        headers = MutableHeaders(scope=message)
        headers.setdefault("x-request-id", self._state["request_id"])
        if headers.get("content-type", "").startswith("text/event-stream"):
            self.is_stream = True
            self._metrics.streams.inc()
