"""Why this worker would not take a job now: what /readyz answers.

Each reason comes from something that happened, and not from a flag: the engine's last sign of life,
the last claim that Redis answered, the last script that it ran for us.

Invariant: a worker without a reason ran a script a moment ago, and had its latest claim answered
then, if it has room and has claimed before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SCRIPT_SILENCE_S = 15.0
"""Heartbeats run a script every few seconds; without one for this long nothing gets through."""
CLAIM_SILENCE_S = 15.0
"""While there is room a claim is made every second or two."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known at one moment; times are monotonic, None: not yet."""

    draining: bool
    engine_ready: bool
    working_since: float | None
    """Since when the engine has had work."""
    last_heard: float | None
    """When the engine last said anything."""
    reachable: bool
    last_script: float | None
    last_claim: float | None
    room: int
    """How many jobs it would claim now."""


class Readiness:
    """Judges the signs.

    Args:
        signs: read at each question.
        step_limit_s: an engine with work and silent for half of this is not counted on.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        signs: Callable[[], Signs],
        *,
        step_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._signs = signs
        self._step_silence_s = step_limit_s / 2
        self._clock = clock

    def reasons(self) -> list[str]:
        """Empty when the worker would take a job."""
        signs, now = self._signs(), self._clock()
        reasons = ["draining"] if signs.draining else []
        reasons += self._of_the_engine(signs, now)
        reasons += self._of_redis(signs, now)
        return reasons

    def _of_the_engine(self, signs: Signs, now: float) -> list[str]:
        if not signs.engine_ready:
            return ["the engine is starting"]
        if signs.working_since is None:
            return []
        silent_s = now - max(signs.working_since, signs.last_heard or 0.0)
        if silent_s > self._step_silence_s:
            return [f"the engine has made no step for {silent_s:.0f} s"]
        return []

    def _of_redis(self, signs: Signs, now: float) -> list[str]:
        if not signs.reachable:
            return ["Redis is not reachable"]
        if signs.last_script is None:
            return ["not registered yet"]
        if (silent_s := now - signs.last_script) > SCRIPT_SILENCE_S:
            return [f"Redis has run no script of ours for {silent_s:.0f} s"]
        if signs.room == 0 or signs.draining or not signs.engine_ready:
            return []  # nothing is claimed
        since = signs.last_claim
        if since is not None and now - since > CLAIM_SILENCE_S:
            return [f"Redis has answered no claim for {now - since:.0f} s"]
        return []
