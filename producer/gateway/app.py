"""The ASGI application: routes, and what happens around every request.

    request id and log line -> CORS -> route -> error as OpenAI's clients read it

Invariant: every response carries `x-request-id`, which is the job's id where there is a job, and
every request makes one log line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported, TokenfleetError
from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.gateway import batches, completions, health, models, status
from tokenfleet.producer.gateway.answers import (
    CLIENT_CLOSED,
    GONE,
    GatewayError,
    answer_of,
    error_response,
    refused,
)
from tokenfleet.producer.gateway.api_keys import Keyring
from tokenfleet.producer.gateway.context import Gateway
from tokenfleet.producer.gateway.desk import Desk
from tokenfleet.producer.gateway.metrics import GatewayMetrics
from tokenfleet.producer.gateway.request_line import RequestLine
from tokenfleet.producer.gateway.settings import GatewaySettings
from tokenfleet.producer.gateway.sse import ReaderGone, end

EXPOSED = ("x-request-id", "retry-after", "x-should-retry")
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
    routes = _routes(settings)
    counts = GatewayMetrics(routes)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        fleet = FleetReader(client.link.connection)
        desk = None if settings.files_dir is None else Desk(settings.files_dir, client)
        app.state.gateway = Gateway(settings, keyring, client, fleet, counts, desk)
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

    middleware = [Middleware(RequestLine, metrics=counts)]
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
        routes=routes,
        middleware=middleware,
        exception_handlers={
            GatewayError: _as_error,
            TokenfleetError: _as_error,
            HTTPException: _as_http_error,
            ReaderGone: _as_gone,
            ClientDisconnect: _as_gone,
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
    if settings.metrics != "off":
        routes.append(Route("/metrics", health.metrics, methods=get))
    if settings.status_page:
        routes += [
            Route("/status", status.page, methods=get),
            Route("/status/fragment", status.part, methods=get),
            Route("/status/data", status.data, methods=get),
        ]
    return routes


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
        message = (
            f"there is nothing at {request.url.path[:80]!r}; the API is {ENDPOINTS}; "
            "for people there is /status"
        )
        return error_response(refused(404, "not_found", message))
    code, message = "http_error", str(error.detail)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        code, message = "method_not_allowed", f"{request.method} is not taken here; use {allowed}"
    response = error_response(refused(error.status_code, code, message))
    response.headers.update(error.headers or {})
    return response


async def _as_gone(request: Request, error: Exception) -> Response:
    request.state.notes["error"] = GONE
    return Response(status_code=CLIENT_CLOSED)
