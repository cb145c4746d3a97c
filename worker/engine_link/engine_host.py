"""Keeps an engine process running: starts it, listens to it, notices when it hangs, restarts it.

Between two engines every job of the first has been handed back. Too many deaths in a row without a
single step between them end the worker: the fault is then in the machine or the model, and not in a
job.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import structlog

from tokenfleet.engine.errors import EngineError
from tokenfleet.worker.dispatch import Dispatcher
from tokenfleet.worker.engine_link.engine_process import EngineHandle, EngineInfo, EngineStartFailed
from tokenfleet.worker.engine_link.engine_spawn import longest_wait, states_of, waits_of
from tokenfleet.worker.observing.telemetry import Telemetry
from tokenfleet.worker.roster import Roster

MAX_DEATHS = 5
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 10.0
MOST_LIMITS = 4
TELL_S = 0.2
"""How long an engine that is about to be killed may take to say where it is."""

log = structlog.get_logger()


class EngineLost(EngineError):
    """The engine process died MAX_DEATHS times in a row without a step."""


class EngineHost:
    """One engine process after the other.

    Args:
        make: a handle for a new engine process.
        step_limit_s: with work, time to run and without a sign of life for longer, it is killed.
        start_limit_s: not ready for this long after its launch, it is killed.
        on_ready: told each time an engine is up.
    """

    def __init__(
        self,
        make: Callable[[], EngineHandle],
        dispatcher: Dispatcher,
        roster: Roster,
        telemetry: Telemetry,
        *,
        step_limit_s: float,
        start_limit_s: float,
        on_ready: Callable[[EngineInfo], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._dispatcher = dispatcher
        self._roster = roster
        self._telemetry = telemetry
        self._step_limit_s = step_limit_s
        self._start_limit_s = start_limit_s
        self._on_ready = on_ready
        self._clock = clock
        self._handle: EngineHandle | None = None
        self._deaths = 0
        self._served = False
        """Whether an engine of these settings has been ready."""
        self._stopping = False

    @property
    def ready(self) -> bool:
        """Whether an engine is there that takes jobs."""
        return self._dispatcher.launcher.engine is not None

    @property
    def last_heard(self) -> float | None:
        """When the engine last said anything; monotonic."""
        return self._handle.last_heard if self._handle else None

    @property
    def pid(self) -> int | None:
        """The process id of the engine that was started last."""
        return self._handle.pid if self._handle else None

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            ConfigError, UnsupportedModel, CheckpointError: no engine can be started this way. Not
                once one has been: the memory of a card may be another process's for a while.
            EngineLost: it dies again and again.
        """
        while True:
            cause = await self._one_life()
            if self._stopping:
                return
            log.error("engine_died", cause=cause, deaths=self._deaths)
            self._telemetry.engine_restarted()
            await self._dispatcher.hand_back(list(self._roster), cause, engine_died=True)
            if self._deaths >= MAX_DEATHS:
                raise EngineLost(
                    f"the engine process died {self._deaths} times in a row without a step; "
                    f"the last time: {cause}"
                )
            backoff = min(FIRST_BACKOFF_S * 2 ** (self._deaths - 1), LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def stop(self) -> None:
        """End the engine; `run` returns."""
        self._stopping = True
        self._dispatcher.launcher.died()
        if self._handle is not None:
            await self._handle.stop()

    async def _one_life(self) -> str:
        """Start an engine and serve it until it dies; returns of what."""
        self._handle = handle = self._make()
        try:
            async with asyncio.timeout(self._start_limit_s) as limit:
                info = await handle.start()
        except (EngineStartFailed, OSError) as error:  # OSError: no process, no memory
            self._deaths += 1
            if limit.expired():
                await self._end_silent(handle)
                return (
                    f"it was not ready after {self._start_limit_s:g} s; if loading takes longer, "
                    "raise engine_start_timeout_s"
                )
            return str(error)
        except EngineError as error:
            if not self._served:
                raise
            self._deaths += 1
            return f"{type(error).__name__}: {error}"
        self._served = True
        self._dispatcher.launcher.engine = handle
        self._on_ready(info)
        self._dispatcher.launcher.now()
        self._roster.touch()
        watch = asyncio.create_task(self._watch(handle))
        try:
            async for batch in handle.batches():
                await self._dispatcher.heard(batch)
        finally:
            watch.cancel()
            self._dispatcher.launcher.died()
        self._deaths = 1 if handle.stepped else self._deaths + 1
        return await handle.cause_of_death()

    async def _watch(self, handle: EngineHandle) -> None:
        """Kill an engine that has work and says nothing.

        Counted is time in which this process looked as often as it meant to, and in which no thread
        of the engine waited for a processor: a machine that has no time for the two is no fault of
        the engine, and what it said meanwhile may be waiting to be read. But no silence lasts
        longer than MOST_LIMITS times the limit. After half of it, and before the end, the engine
        writes where it is: two looks tell what stands still from what is slow.
        """
        tick_s = self._step_limit_s / 4
        silent_s = total_s = heard = 0.0
        asked = False
        waits = waits_of(handle.pid)
        while True:
            looked = self._clock()
            await asyncio.sleep(tick_s)
            waits, waited = waits_of(handle.pid), waits
            since = self._dispatcher.launcher.working_since
            if since is None:
                continue
            heard, before = max(since, handle.last_heard), heard
            if heard != before:
                silent_s, total_s, asked = 0.0, 0.0, False
            now = self._clock()
            passed_s = min(now - max(looked, heard), tick_s)
            total_s += passed_s
            silent_s += max(0.0, passed_s - longest_wait(waited, waits))
            if silent_s > self._step_limit_s or total_s > MOST_LIMITS * self._step_limit_s:
                log.error("engine_hangs", **_looks(handle, now - heard))
                await self._end_silent(handle)
                return
            if total_s > self._step_limit_s / 2 and not asked:
                asked = True
                log.warning("engine_silent", **_looks(handle, now - heard))
                handle.tell_where()

    async def _end_silent(self, handle: EngineHandle) -> None:
        """Kill an engine once it has said where it is."""
        handle.tell_where()
        await asyncio.sleep(TELL_S)
        await handle.kill()


def _looks(handle: EngineHandle, silent_s: float) -> dict[str, object]:
    """What can be seen of a silent engine from outside."""
    return {"silent_s": round(silent_s, 1), "threads": states_of(handle.pid)}
