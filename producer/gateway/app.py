"""The ASGI application: routes, and what happens around every request.

    request id and log line -> CORS -> route -> error as OpenAI's clients read it

Invariant: every response carries `x-request-id`, which is the job's id where there is a job, and
every request makes one log line.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenfleet.producer import tracing
from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported, TokenfleetError
from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.gateway import batches, completions, health, models, status
from tokenfleet.producer.gateway.answers import GatewayError, answer_of, error_response, refused
from tokenfleet.producer.gateway.api_keys import Keyring
from tokenfleet.producer.gateway.context import Gateway
from tokenfleet.producer.gateway.desk import Desk
from tokenfleet.producer.gateway.settings import GatewaySettings
from tokenfleet.producer.gateway.sse import ReaderGone, end

QUIET = ("/healthz", "/readyz", "/status/fragment", "/status/data")
"""Logged at debug only: they are asked for every few seconds."""
EXPOSED = ("x-request-id", "retry-after", "x-should-retry")
CLIENT_CLOSED = 499
CONNECT_TIMEOUT_S = 4.0
"""Redis out of reach for longer is a 503: whoever asked can do something else."""
ENDPOINTS = "/v1/chat/completions, /v1/completions, /v1/models, /v1/files and /v1/batches"

log = logging.getLogger(__name__)


def create_app(settings: GatewaySettings) -> Starlette:
    """The application. It connects to Redis when first needed, and on its own once it is back.

    Raises:
        SettingsError: the keys_file cannot be used.
    """
    client = AsyncClient(
        settings.redis_url,
        namespace=settings.namespace,
        partitions=settings.partitions,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )
    keyring = Keyring(settings.keys_file, stranger=settings.stranger)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        fleet = FleetReader(client.link.connection)
        desk = None if settings.files_dir is None else Desk(settings.files_dir, client)
        app.state.gateway = Gateway(settings, keyring, client, fleet, desk)
        if desk is not None:
            await desk.take_up()
        app.state.sampler = status.Sampler(fleet, history_s=settings.history_s)
        looking = asyncio.create_task(app.state.sampler.run()) if settings.status_page else None
        try:
            yield
        finally:
            await end(looking)
            if desk is not None:
                await desk.aclose()
            await client.aclose()

    middleware = [Middleware(RequestLine)]
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=EXPOSED,
            )
        )
    return Starlette(
        routes=_routes(settings),
        middleware=middleware,
        exception_handlers={
            GatewayError: _as_error,
            TokenfleetError: _as_error,
            HTTPException: _as_http_error,
            ReaderGone: _as_gone,
        },
        lifespan=lifespan,
    )


def _routes(settings: GatewaySettings) -> list[BaseRoute]:
    post, get = ["POST"], ["GET"]
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", completions.chat, methods=post),
        Route("/v1/chat/completions/{response_id}", completions.fetch_chat, methods=get),
        Route("/v1/completions", completions.completions, methods=post),
        Route("/v1/completions/{response_id}", completions.fetch_completion, methods=get),
        Route("/v1/models", models.list_models, methods=get),
        Route("/v1/models/{model:path}", models.show_model, methods=get),
        Route("/v1/files", batches.upload, methods=post),
        Route("/v1/files", batches.list_files, methods=get),
        Route("/v1/files/{file_id}", batches.show_file, methods=get),
        Route("/v1/files/{file_id}", batches.delete_file, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", batches.file_content, methods=get),
        Route("/v1/batches", batches.create_batch, methods=post),
        Route("/v1/batches", batches.list_batches, methods=get),
        Route("/v1/batches/{batch_id}", batches.show_batch, methods=get),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel_batch, methods=post),
        Route("/healthz", health.healthz, methods=get),
        Route("/readyz", health.readyz, methods=get),
    ]
    if settings.status_page:
        routes += [
            Route("/status", status.page, methods=get),
            Route("/status/fragment", status.part, methods=get),
            Route("/status/data", status.data, methods=get),
        ]
    return routes


class RequestLine:
    """Gives every request an id and notes, and writes its one log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        state = scope.setdefault("state", {})
        state["notes"], state["request_id"] = {}, f"req-{uuid.uuid4()}"
        code = 0

        async def with_id(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                MutableHeaders(scope=message).setdefault("x-request-id", state["request_id"])
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except Exception as error:  # a fault of ours: said once, and answered
            state["notes"]["error"] = "internal_error"
            log.error("request_broke", exc_info=error, extra={"fields": {"path": scope["path"]}})
            if not code:
                await error_response(error)(scope, receive, with_id)
        finally:
            self._say(scope, code, (time.monotonic() - began) * 1000)

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


async def _as_error(request: Request, error: Exception) -> Response:
    answer, _ = answer_of(error)
    request.state.notes["error"] = answer.code
    if isinstance(error, BrokerUnavailable | BrokerUnsupported):
        log.warning("broker_not_usable", extra={"fields": {"error": str(error)}})
    return error_response(error)


async def _as_http_error(request: Request, error: Exception) -> Response:
    """The framework's own: no such path, no such method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:80]!r}; the API is {ENDPOINTS}"
        return error_response(refused(404, "not_found", message))
    response = error_response(refused(error.status_code, "http_error", str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _as_gone(request: Request, error: Exception) -> Response:
    request.state.notes["error"] = "client_closed"
    return Response(status_code=CLIENT_CLOSED)
