"""Who may look at the whole fleet: at /status and, unless the settings say otherwise, at /metrics.

Invariant: only keys that say `status = true`, where keys are asked for at all.
"""

from __future__ import annotations

import base64
import binascii

from starlette.requests import Request

from tokenfleet.producer.batch import ErrorAnswer
from tokenfleet.producer.gateway.answers import GatewayError, refused
from tokenfleet.producer.gateway.context import gateway_of, note


def check_viewer(request: Request) -> None:
    """A browser sends the key as the password of any name. Raises GatewayError 401, 403."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    key = given.strip() or None
    if scheme.lower() == "basic":
        key = _password(given)
    caller = gateway_of(request).keyring.caller(key)
    if caller is None:
        message = "this asks for a key that may see the fleet, as password or token"
        answer = ErrorAnswer(401, "invalid_api_key", message)
        raise GatewayError(answer, {"www-authenticate": 'Basic realm="tokenfleet"'})
    note(request, key=caller.key_name)
    if not caller.sees_status:
        message = "this key may not see the fleet: its entry would have to say status = true"
        raise refused(403, "status_not_allowed", message)


def _password(given: str) -> str | None:
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None
