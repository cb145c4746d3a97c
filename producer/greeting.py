"""Whether what answers is a Redis, and new enough: read off its answer to HELLO.

Invariant: nothing else is asked of a server that has not passed.
"""

from __future__ import annotations

from typing import Any

from tokenfleet.producer.errors import BrokerUnsupported
from tokenfleet.producer.given import Given

_MINIMUM = {"redis": (7, 0), "valkey": (7, 2)}


def check_greeting(reply: Any, given: Given) -> None:
    """Raises BrokerUnsupported. `reply`: RESP2's flat list or RESP3's map."""
    if not isinstance(reply, dict):
        reply = dict(zip(reply[::2], reply[1::2])) if isinstance(reply, list) else {}
    found = {_text(key): value for key, value in reply.items()}
    if "server" not in found or "version" not in found:
        raise BrokerUnsupported(f"what answers is no Redis ({given.name}); {given.doubt}")
    _check_version(_text(found["server"]), _text(found["version"]))


def _check_version(server: str, version: str) -> None:
    needed = _MINIMUM.get(server, _MINIMUM["redis"])
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < needed:
        wanted = ".".join(map(str, needed))
        raise BrokerUnsupported(
            f"{server} {version} is too old: tokenfleet needs Redis >= 7.0 or Valkey >= 7.2 "
            f"(here {server} >= {wanted})"
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
