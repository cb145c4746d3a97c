"""The jobs that this worker owns, and how many more it may take.

A job is in here from the reply to its claim until its end is in Redis or its lease is known to be
gone; so what is not in here and yet in our name in Redis is nobody's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

from tokenfleet.worker.jobs import Job, Stage


class Roster:
    """Jobs by id.

    Args:
        slots: rows of the engine's batch.
        prefetch: jobs that may be owned beyond them.
    """

    def __init__(self, slots: int, prefetch: int) -> None:
        self.slots = slots
        self.prefetch = prefetch
        self._jobs: dict[str, Job] = {}
        self._by_engine_id: dict[str, Job] = {}
        self._changed = asyncio.Event()
        """Of the next touch; each touch has one of its own, so no waiter takes another's."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def get(self, job_id: str) -> Job | None:
        """The job with this id, whichever attempt."""
        return self._jobs.get(job_id)

    def by_engine_id(self, engine_id: str) -> Job | None:
        """The job that the engine knows by this id."""
        return self._by_engine_id.get(engine_id)

    def add(self, job: Job) -> None:
        """Take a claimed job in. An older attempt of it must have left."""
        assert job.id not in self._jobs
        self._jobs[job.id] = job
        self._by_engine_id[job.engine_id] = job

    def remove(self, job: Job) -> None:
        """Forget a job that is no longer ours."""
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]
            del self._by_engine_id[job.engine_id]
        if job.stage is not Stage.GONE:
            job.move(Stage.GONE)
        self.touch()

    @property
    def free_slots(self) -> int:
        """Slots nobody holds or waits for; negative: that many sequences wait."""
        return self.slots - sum(job.slots for job in self._jobs.values())

    @property
    def running(self) -> int:
        """Jobs in the engine."""
        return sum(job.stage is Stage.RUNNING for job in self._jobs.values())

    def room(self) -> int:
        """Jobs to claim now: one for each free slot; the prefetch only once there is none."""
        free = self.free_slots
        wanted = free if free > 0 else self.prefetch + free
        return max(0, min(wanted, self.slots + self.prefetch - len(self._jobs)))

    def touch(self) -> None:
        """Something changed that `change` may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    def change(self) -> Coroutine[Any, Any, object]:
        """Wait for the next touch: the first one after this call, whenever it is awaited."""
        return self._changed.wait()
