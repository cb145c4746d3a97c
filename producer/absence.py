"""Waiting for a job that Redis has forgotten: the worker of one that runs gives it back.

A server that was emptied, or started again without a file, knows a running job no more until its
worker hears of that. A job that waited is in nobody's hands, and gone.

Invariant: a job is never waited for longer than the patience, however often it is looked for.
"""

from __future__ import annotations

import asyncio

from tokenfleet.producer.errors import JobExpired
from tokenfleet.producer.states import State

SILENCES = 2
"""Of a job nothing is heard and nothing found for so many silences before it is gone. A worker that
has nothing to publish hears of it when it renews: within 10 s with the usual lease."""


class Absence:
    """How long one job may be gone."""

    def __init__(self, job_id: str, silence_s: float) -> None:
        self._job_id = job_id
        self._patience_s = SILENCES * silence_s
        self._until: float | None = None
        """By the loop's clock; None while the job is there."""
        self.ran = False
        """Whether it did when it was last heard of."""

    def wait_s(self, state: State | None) -> float:
        """How long to wait before the next look; 0 where the job is there.

        Raises JobExpired when it has been gone for too long.
        """
        if state is not None:
            self.ran, self._until = state is State.RUNNING, None
            return 0.0
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + (self._patience_s if self.ran else 0.0)
        if now >= self._until:
            raise JobExpired(self._job_id)
        return self._until - now
