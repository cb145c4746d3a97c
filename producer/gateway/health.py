"""/healthz, /readyz and /metrics: does the loop turn, would a request be taken now, what has been?

Invariant: none says anything of a job or a tenant; the probes need no key.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tokenfleet.producer.errors import TokenfleetError
from tokenfleet.producer.gateway.context import Gateway, gateway_of
from tokenfleet.producer.gateway.viewers import check_viewer

PATIENCE_S = 1.0
"""Redis has this long to answer."""


async def healthz(request: Request) -> Response:
    """GET /healthz."""
    return PlainTextResponse("ok\n")


async def readyz(request: Request) -> Response:
    """GET /readyz: 200, or 503 and why not, one reason a line."""
    reasons = await _reasons(gateway_of(request))
    text = "\n".join(reasons or ["ready"]) + "\n"
    return PlainTextResponse(text, 503 if reasons else 200)


async def _reasons(gateway: Gateway) -> list[str]:
    reasons = ["draining"] if gateway.draining else []
    try:
        async with asyncio.timeout(PATIENCE_S):
            await gateway.client.link.connection.ready()
            await gateway.fleet.now_ms()
    except TimeoutError:
        reasons.append(f"Redis did not answer within {PATIENCE_S:g} s")
    except TokenfleetError as error:  # its sentence names the server; anybody may ask here
        reasons.append(f"Redis cannot be used ({type(error).__name__})")
    return reasons


async def metrics(request: Request) -> Response:
    """GET /metrics: 200, or 401 and 403 where the figures ask for a key."""
    gateway = gateway_of(request)
    if gateway.settings.metrics == "key":
        check_viewer(request)
    content_type, body = gateway.metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})
