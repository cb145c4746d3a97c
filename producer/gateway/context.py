"""What all requests of one gateway share, made when it starts.

Invariant: nothing in here belongs to one request; what a request notes for its log line is in
`request.state.notes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.gateway.answers import unauthorized
from tokenfleet.producer.gateway.api_keys import Caller, Keyring
from tokenfleet.producer.gateway.desk import Desk
from tokenfleet.producer.gateway.metrics import GatewayMetrics, Passage
from tokenfleet.producer.gateway.settings import GatewaySettings


@dataclass(slots=True)
class Gateway:
    """Settings, keys, and the way to Redis."""

    settings: GatewaySettings
    keyring: Keyring
    client: AsyncClient
    fleet: FleetReader
    metrics: GatewayMetrics
    desk: Desk | None = None
    """Files and batches; None: they are not offered."""
    draining: bool = False
    """Told to end: /readyz says so."""
    known_models: dict[str, float] = field(default_factory=dict)
    """Models that were found lately, and until when that counts (models.py)."""


def gateway_of(request: Request) -> Gateway:
    """The gateway that a request came to."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def passage_of(request: Request) -> Passage:
    """When the request came by where: for its metrics."""
    passage: Passage = request.state.passage
    return passage


def note(request: Request, **fields: Any) -> None:
    """For the request's log line. Never what was asked or answered."""
    request.state.notes.update(fields)


def caller_of(request: Request) -> Caller:
    """Who asks. Raises GatewayError 401."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    presented = key.strip() if scheme.lower() == "bearer" else None
    presented = presented or request.headers.get("api-key")
    caller = gateway_of(request).keyring.caller(presented)
    if caller is None:
        raise unauthorized(presented is not None)
    note(request, tenant=caller.tenant, key=caller.key_name)
    return caller
