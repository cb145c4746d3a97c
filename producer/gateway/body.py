"""Request bodies, read within a limit and a time.

Invariant: no more than the limit and one chunk is ever held, whatever Content-Length says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request

from tokenfleet.producer.gateway.answers import GatewayError, refused

PIECE_S = 30.0
"""How long a sender may be silent in the middle of a body."""
JSON_BODY_S = 60.0
"""How long all of a JSON body may take."""


def too_large(limit: int) -> GatewayError:
    """413: more than `limit` bytes."""
    return refused(413, "body_too_large", f"the body is larger than {limit} bytes, the most here")


def too_slow() -> GatewayError:
    """408: its sender fell silent."""
    return refused(408, "body_too_slow", "the rest of the body did not come in time")


async def limited(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body's chunks.

    Raises:
        GatewayError: 413 as soon as it is known to be too large, 408 when its sender falls silent.
    """
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or int(said) > limit:
        raise too_large(limit)
    seen, chunks = 0, request.stream()
    while True:
        try:
            async with asyncio.timeout(PIECE_S):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise too_slow() from None
        seen += len(chunk)
        if seen > limit:
            raise too_large(limit)
        yield chunk


async def json_body(request: Request, limit: int) -> Any:
    """The body as JSON. Raises GatewayError: 408, 413, 415, or 400 where it is none."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise refused(415, "unsupported_media_type", "the body must be application/json")
    if request.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        message = "the body must come as it is, without Content-Encoding"
        raise refused(415, "unsupported_content_encoding", message)
    try:
        async with asyncio.timeout(JSON_BODY_S):
            content = b"".join([chunk async for chunk in limited(request, limit)])
    except TimeoutError:
        raise too_slow() from None
    try:
        text = content.decode()
        value = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:  # half a surrogate pair can be neither sent nor answered
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        where = f" ({error})" if isinstance(error, json.JSONDecodeError) else ""
        raise refused(400, "invalid_json", f"the body is not valid JSON{where}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
