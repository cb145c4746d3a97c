"""Whether Redis is there, as this worker last saw it, and how long to wait before the next try.

Loops that talk to Redis go on for ever: they report each call here, so that one outage is one log
line when it begins and one when it ends, however many loops meet it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError, ResponseError

from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported, KeyOccupied
from tokenfleet.producer.refusals import SERVER_WIDE

BROKER_ERRORS = (BrokerUnavailable, BrokerUnsupported, RedisError, OSError)
"""What a server looks like that is away, loading, demoted, full, or refuses us for now. A worker
that runs outlives all of it: whoever owns the server can mend it without restarting the fleet."""

_NOT_THE_REQUEST = (*SERVER_WIDE, "NOPERM", "OOM")
"""Replies that say something about the server, and nothing about what was asked."""

PART_AWAY_S = 10.0
"""On a cluster: so long after a call that got through another one that did not says of a part only
that it is away. Some call is made every few seconds."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
REPEAT_S = 60.0
"""How long the same trouble is said only once: one call may fail for ever while others pass."""

log = structlog.get_logger()


def blames_request(error: Exception) -> bool:
    """Whether Redis refused this very call, so that repeating it is no use."""
    if isinstance(error, KeyOccupied):
        return True
    return isinstance(error, ResponseError) and not str(error).startswith(_NOT_THE_REQUEST)


class Broker:
    """Reachability of Redis, shared by all loops of one worker.

    Args:
        clock: monotonic seconds.
        several: Redis is several servers, of which one may be away while the others serve.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, several: bool = False
    ) -> None:
        self._clock = clock
        self._several = several
        self._reached_at = -PART_AWAY_S
        self._away_since: float | None = None
        self._said: tuple[str, str] | None = None
        self._said_at = -REPEAT_S
        self._quiet = False
        self._pause_s = FIRST_PAUSE_S
        self.back = asyncio.Event()
        """Set when an outage ends; cleared by the lease keeper, who looks at all jobs then."""

    @property
    def reachable(self) -> bool:
        """Whether the last call that said anything got through; of several servers, whether any
        call did lately: a part that is silent would have this change with every call."""
        part = self._several and self._clock() - self._reached_at < PART_AWAY_S
        return part or self._away_since is None

    def away(self, call: str, error: Exception) -> None:
        """A call did not get through."""
        if self._away_since is not None:
            return
        self._away_since = now = self._clock()
        said = (call, f"{type(error).__name__}: {error}")
        self._quiet = said == self._said and now - self._said_at < REPEAT_S
        if not self._quiet:
            self._said, self._said_at = said, now
            log.warning("broker_away", call=said[0], error=said[1])

    def reached(self) -> None:
        """A call got through."""
        self._reached_at = self._clock()
        if self._away_since is not None:
            if not self._quiet:
                log.info("broker_back", away_s=round(self._clock() - self._away_since, 3))
            self._away_since = None
            self._pause_s = FIRST_PAUSE_S
            self.back.set()

    async def pause(self) -> None:
        """Wait before the next try: doubling, jittered, at most LONGEST_PAUSE_S."""
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
