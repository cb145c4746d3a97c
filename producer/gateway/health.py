"""/healthz and /readyz: is the event loop turning, and would a request be taken now?

Invariant: neither needs a key, and neither says anything of a job.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tokenfleet.producer.errors import TokenfleetError
from tokenfleet.producer.gateway.context import Gateway, gateway_of

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
