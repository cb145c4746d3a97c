"""/v1/models, and which models are accepted.

A model is known while a live worker serves it, while a queue of it is there (a fleet scaled to zero
keeps its queues), or when the settings name it. Anything else is a spelling mistake far more often
than a model about to come, and a job of it would wait for ever: it is 404, unless the settings say
that such jobs are to wait (`unknown_models = "queue"`).

Invariant: a model that is known is never looked up more than once in KNOWN_S.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tokenfleet.producer.gateway.answers import refused
from tokenfleet.producer.gateway.context import Gateway, caller_of, gateway_of

KNOWN_S = 60.0


async def require_model(gateway: Gateway, model: str) -> None:
    """Raises GatewayError 404 for a model that is not known."""
    settings = gateway.settings
    if settings.unknown_models == "queue" or model in settings.models:
        return
    now = time.monotonic()
    if gateway.known_models.get(model, 0.0) > now:
        return
    if not await gateway.fleet.knows(model):
        raise unknown_model(model)
    gateway.known_models[model] = now + KNOWN_S


def unknown_model(model: str) -> Exception:
    """404 for a model that no worker serves and no queue waits for."""
    message = (
        f"there is no model {model[:80]!r} here: no worker serves it and no queue waits for it"
    )
    return refused(404, "model_not_found", message, "model")


async def list_models(request: Request) -> Response:
    """GET /v1/models."""
    caller_of(request)
    found = await _found(gateway_of(request))
    return JSONResponse({"object": "list", "data": [_model(*one) for one in sorted(found.items())]})


async def show_model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    caller_of(request)
    model = request.path_params["model"]
    found = await _found(gateway_of(request))
    if model not in found:
        raise unknown_model(model)
    return JSONResponse(_model(model, found[model]))


async def _found(gateway: Gateway) -> dict[str, int]:
    named = dict.fromkeys(gateway.settings.models, 0)
    return named | await gateway.fleet.models()


def _model(name: str, workers: int) -> dict[str, Any]:
    """The API has no place for it, but an operator asks first whether anybody serves the model."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "tokenfleet",
        "tokenfleet": {"workers": workers},
    }
