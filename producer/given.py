"""What a client was given to reach Redis by: a URL, or a redis-py client.

Invariant: it is one that can be used; what is told of it holds no password.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio as aio

from tokenfleet.producer.address import CLUSTER, WAY_OUT, Address, parse_address
from tokenfleet.producer.dialing import dial, dial_like
from tokenfleet.producer.errors import BrokerUnsupported, InvalidJob
from tokenfleet.producer.mended import Door

Broker = str | aio.Redis | aio.RedisCluster | redis.Redis
"""What a client may be given: a URL, or a redis-py client."""


class Given:
    """One of these. Raises InvalidJob, BrokerUnsupported for what cannot be used."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.address = _checked(broker)
        """What the URL said; None for a client that was handed in."""
        self.cluster = isinstance(broker, aio.RedisCluster) or (
            self.address is not None and self.address.kind == CLUSTER
        )

    def open(self, timeout_s: float, door: Door) -> Any:
        """A redis-py client to it, not connected yet; see dialing.py."""
        if self.address is not None:
            return dial(self.address, timeout_s, door)
        assert not isinstance(self.broker, str)
        return dial_like(self.broker, timeout_s, door)

    @property
    def name(self) -> str:
        """The server for messages."""
        return f"Redis at {self.address.shown}" if self.address is not None else "Redis"

    @property
    def doubt(self) -> str:
        """What to look at where nobody answers there."""
        if self.address is not None and self.address.tls:
            return "is it running, the address right, and does it speak TLS there?"
        return "is it running, and the address right?"


def _checked(broker: Broker) -> Address | None:
    """The address in a URL; of a client handed in, only that it can be used."""
    if isinstance(broker, str):
        return parse_address(broker)
    if not isinstance(broker, aio.Redis | aio.RedisCluster | redis.Redis):
        raise InvalidJob("redis_url", broker, f"{WAY_OUT}, or be a redis-py client")
    if broker.get_encoder().decode_responses:
        raise BrokerUnsupported(
            "a client with decode_responses cannot be used: jobs and events are bytes; "
            "leave decode_responses out"
        )
    return None
