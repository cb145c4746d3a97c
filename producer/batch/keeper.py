"""Writes what comes back: in the order it comes, or in the order of the input.

All of it blocks and is called in a thread. A job's result in Redis is let go only when its line is
on the disk.

Invariant: when ordered, the next line written is the first one that is not done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tokenfleet.producer.batch.output import Output
from tokenfleet.producer.batch.records import Ended, Record, record_of
from tokenfleet.producer.batch.remote import Flight
from tokenfleet.producer.batch.state import BatchState
from tokenfleet.producer.states import State

SYNC_EVERY_S = 1.0
MOST_HELD_BYTES = 32 << 20
"""Results that wait for an earlier line; beyond, only the first line of all is asked for."""


class Keeper:
    """Takes records and job ends; knows which of them are safe."""

    def __init__(
        self, output: Output, state: BatchState, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._output = output
        self._batch = state.id
        self._ordered = state.settings.ordered
        self._lines = state.lines
        self._next = 1
        self._held: dict[int, tuple[Record, str | None, int]] = {}
        self._held_bytes = 0
        self._unsafe: list[str] = []
        self._now = now
        self._synced = now()

    @property
    def full(self) -> bool:
        """Too much waits for an earlier line."""
        return self._held_bytes > MOST_HELD_BYTES

    def ended(self, found: Iterable[tuple[Flight, Ended]]) -> None:
        """Write the lines of jobs that have ended."""
        for flight, job in found:
            record = record_of(self._batch, flight.line, flight.custom_id, flight.shape, job)
            # a dead letter is kept as long as dead letters are
            freed = None if job.state is State.FAILED else flight.job_id
            self.keep(record, freed, len(job.result or b""))
        self._output.flush()

    def keep(self, record: Record, job_id: str | None = None, size: int = 0) -> None:
        """Write one line, or hold it until its turn comes."""
        if not self._ordered:
            self._write(record, job_id)
            return
        self._held[record.line] = record, job_id, size
        self._held_bytes += size
        while self._next <= self._lines:
            if self._next in self._held:
                ready, freed, held = self._held.pop(self._next)
                self._held_bytes -= held
                self._write(ready, freed)
            elif not self._output.done[self._next]:
                return
            self._next += 1

    def _write(self, record: Record, job_id: str | None) -> None:
        self._output.add(record)
        if job_id is not None:
            self._unsafe.append(job_id)

    def sync(self, *, at_once: bool = False) -> list[str]:
        """Force lines to the disk when it is time; the jobs whose lines are there now."""
        now = self._now()
        if not at_once and now - self._synced < SYNC_EVERY_S:
            return []
        self._output.sync()
        self._synced = now
        safe, self._unsafe = self._unsafe, []
        return safe
