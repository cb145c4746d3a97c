"""When jobs that are ready go to the engine, and whether it has work.

Invariant: jobs made ready in one turn of the loop are given together, for one step, or as many of
them as fill it; of those that may kill an engine, one runs at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tokenfleet.engine.request import EngineRequest
from tokenfleet.worker.jobs import Job, Stage
from tokenfleet.worker.roster import Roster

HOLD_S = 0.01
"""Longest wait of a ready job for those that are being claimed behind it."""


class Engine(Protocol):
    """What is needed of an engine process (engine_link/engine_process.py: EngineHandle)."""

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, id: str, choice: int | None = None) -> None: ...
    def flush(self) -> None: ...


class Launcher:
    """Gives the engine the roster's jobs that are ready.

    Args:
        step_tokens: prompt tokens that fill a step of the engine.
        clock: monotonic seconds.
    """

    def __init__(self, roster: Roster, *, step_tokens: int, clock: Callable[[], float]) -> None:
        self._roster = roster
        self._step_tokens = step_tokens
        self._clock = clock
        self._due: asyncio.Handle | None = None
        self.others_follow = False
        """Whether more jobs are being claimed at this moment."""
        self.engine: Engine | None = None
        """The engine that runs now; None while there is none."""
        self.working_since: float | None = None
        """Since when the engine has had work without a pause; None when it has none."""

    def soon(self) -> None:
        """Launch what this turn of the loop makes ready. What does not fill a step waits a moment
        for jobs that follow."""
        if not self._held():
            self._forget_due()
            self._due = asyncio.get_running_loop().call_soon(self.now)

    def ready(self) -> None:
        """The same for what is ready already."""
        if not self._held():
            self.now()

    def _held(self) -> bool:
        """Whether it waits for jobs that follow."""
        if not self.others_follow or self._tokens_ready() >= self._step_tokens:
            return False
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(HOLD_S, self.now)
        return True

    def at_once(self, tokens: int) -> None:
        """Launch what is ready if so many prompt tokens of it fill a step and the engine has
        nothing to do: it begins while more is made ready."""
        if self.working_since is None and tokens >= self._step_tokens:
            self.now()

    def now(self) -> None:
        """Launch every job that is ready."""
        self._forget_due()
        if self.engine is None:
            return
        added = False
        suspects = any(j.suspect and j.stage is Stage.RUNNING for j in self._roster)
        for job in self._roster:
            if job.stage is not Stage.READY or (job.suspect and suspects):
                continue
            suspects = suspects or job.suspect
            if self.working_since is None:
                self.working_since = self._clock()
            job.move(Stage.RUNNING)
            self.engine.add(job.request)
            added = True
        if added:
            self.engine.flush()

    def abort(self, job: Job) -> None:
        """Stop a job that runs in the engine."""
        if self.engine is not None and job.stage is Stage.RUNNING:
            self.engine.abort(job.engine_id)

    def abort_choice(self, job: Job, choice: int) -> None:
        """Stop one of its samples there, of which enough was heard."""
        if self.engine is not None:
            self.engine.abort(job.engine_id, choice)

    def heard(self) -> None:
        """The engine has spoken: from now on it works without a pause, or has nothing to do."""
        busy = any(job.stage is Stage.RUNNING for job in self._roster)
        self.working_since = self._clock() if busy else None

    def died(self) -> None:
        """There is no engine: nothing more is to be claimed for it."""
        self.engine = self.working_since = None
        self._roster.touch()

    def _tokens_ready(self) -> int:
        ready = (job for job in self._roster if job.stage is Stage.READY)
        return sum(len(job.request.prompt_token_ids) for job in ready)

    def _forget_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
