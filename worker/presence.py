"""This worker in the eyes of others: its line in the worker table, and what its start took.

A worker that is not in the table serves all the same; nobody's job depends on the line. But none
serves under the id of another one that is alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version

import structlog

from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.broker import BROKER_ERRORS, Broker
from tokenfleet.worker.incarnation import Incarnation, WorkerIdTaken
from tokenfleet.worker.queue import JobQueue

HEARTBEAT_S = 4.0
HEARTBEAT_TTL_S = 15.0
LOOK_S = 0.5

log = structlog.get_logger()


class Presence:
    """Keeps the line fresh.

    Args:
        about: the figures of the moment.
        on_registered: called once, when the line is there for the first time.
    """

    def __init__(
        self,
        queue: JobQueue,
        broker: Broker,
        *,
        about: Callable[[], Mapping[str, str | int | float]],
        on_registered: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._broker = broker
        self._about = about
        self._on_registered = on_registered
        self._who = Incarnation()
        self._fixed: dict[str, str | int | float] = {
            **self._who.as_line(),
            "version": version("tokenfleet"),
        }
        self._held_at: int | None = None
        """When another worker under our id, of which we do not know whether it is alive, had
        written its line; by the server's clock."""
        self.named = asyncio.Event()
        """Set once nobody else is known to have our id."""
        self.last_written: float | None = None
        """When the line was last written, by a script; monotonic."""

    @property
    def registered(self) -> bool:
        """Whether the line has been there."""
        return self.last_written is not None

    async def run(self) -> None:
        """Write the line every few seconds until cancelled.

        Raises WorkerIdTaken: another worker keeps up a line under our id.
        """
        while True:
            try:
                await self._queue.heartbeat({**self._fixed, **self._about()}, ttl_s=HEARTBEAT_TTL_S)
            except WorkerIdTaken as error:
                await self._wait_for_id(error)
                continue
            except BROKER_ERRORS as error:
                self.named.set()
                self._broker.away("heartbeat", error)
                await self._broker.pause()
                continue
            self.named.set()
            self._broker.reached()
            first, self.last_written = not self.registered, time.monotonic()
            if first:
                self._on_registered()
            await asyncio.sleep(HEARTBEAT_S)

    async def _wait_for_id(self, taken: WorkerIdTaken) -> None:
        """A line of a worker that was killed runs out; a second one of a worker that lives does
        not come to us."""
        if self.registered or self._held_at not in (None, taken.seen_ms):
            raise taken
        if self._who.knows_ended(taken.holder):
            with suppress(*BROKER_ERRORS):
                await self._queue.take_over()
            return
        if self._held_at is None:
            log.warning("worker_id_held", problem=str(taken), at_most_s=HEARTBEAT_TTL_S)
        self._held_at = taken.seen_ms
        await asyncio.sleep(LOOK_S)


class Pace:
    """What the engine does, between one look and the next.

    Args:
        latest: the engine's last step, with totals since its start.
        clock: monotonic seconds.
    """

    def __init__(
        self, latest: Callable[[], StepStats], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._latest = latest
        self._clock = clock
        self._seen: tuple[float, int] | None = None

    def figures(self) -> dict[str, float]:
        """tokens_per_s since the last look, and kv_usage where there are blocks."""
        stats, now = self._latest(), self._clock()
        total = stats.decode_tokens_total
        before, self._seen = self._seen, (now, total)
        found: dict[str, float] = {}
        if before is not None and now > before[0]:
            made = total - before[1] if total >= before[1] else total  # another engine counts anew
            found["tokens_per_s"] = round(made / (now - before[0]), 2)
        if stats.blocks_total:
            found["kv_usage"] = round(stats.blocks_used / stats.blocks_total, 4)
        return found


class StartFigures:
    """How long each part of the start took, said once."""

    def __init__(self, started: float | None = None) -> None:
        self._started = time.monotonic() if started is None else started
        self._figures: dict[str, float] = {}
        self._said = False

    def mark(self, name: str) -> None:
        """This part is done now; counted from the start of the process."""
        self._figures.setdefault(name, time.monotonic() - self._started)

    def note(self, **seconds: float) -> None:
        """Figures that others measured."""
        self._figures |= seconds

    def say(self, model: str) -> None:
        """One line, the first time."""
        if not self._said:
            self._said = True
            self.mark("total_s")
            figures = {name: round(seconds, 3) for name, seconds in self._figures.items()}
            log.info("worker_ready", model=model, **figures)
