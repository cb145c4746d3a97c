"""Who makes way on a full worker: batch jobs, for more urgent ones that wait.

Batch work fills what is idle; to put a batch job back costs its tokens computed so far, which the
next attempt computes again from its log. So those go first that have least to lose, and each job
only so often: then it stays until it is done. One that was claimed for the floor of its class stays
as well: the floor would be none if it had to make way at once.

Invariant: a job makes way for a more urgent class only, and never for its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenfleet.producer.keys import PRIORITIES
from tokenfleet.worker.jobs import Job, Stage

LOWEST = PRIORITIES[-1]
"""The class whose jobs make way."""

_UNBEGUN = (Stage.CLAIMED, Stage.READY)
_RANK = {priority: rank for rank, priority in enumerate(PRIORITIES)}


class Seats:
    """Which jobs hold the engine's slots, as far as can be told from outside it.

    Args:
        slots: rows of the engine's batch.
        most: how often one job may be put back; 0: never.
    """

    def __init__(self, slots: int, most: int) -> None:
        self._slots = slots
        self._most = most
        self._seated: set[str] = set()

    def to_make_way(self, jobs: Iterable[Job]) -> list[Job]:
        """Batch jobs to put back so that more urgent ones that are in the engine can begin."""
        jobs = list(jobs)
        if not self._some_may(jobs):
            return []
        seated, waiting = self._look(jobs)
        wanted = sum(job.slots for job in waiting if _is_urgent(job)) + self._missing(seated)
        chosen = []
        for job in self._by_loss(seated):
            if wanted <= 0:
                break
            chosen.append(job)
            wanted -= job.slots
        return chosen

    def victims(self, jobs: Iterable[Job]) -> list[Job]:
        """Batch jobs whose places more urgent jobs may have, in the order to give them up.

        Those that hold a slot come first: the others' places are no slots yet.
        """
        jobs = list(jobs)
        if not self._some_may(jobs):
            return []
        seated, waiting = self._look(jobs)
        unbegun = [*waiting, *(job for job in jobs if job.stage in _UNBEGUN)]
        return [*self._by_loss(seated), *self._by_loss(unbegun)]

    def _look(self, jobs: list[Job]) -> tuple[list[Job], list[Job]]:
        """Jobs that hold slots, and jobs that wait for one in the engine, as it would take them."""
        seated: list[Job] = []
        waiting: list[Job] = []
        for job in jobs:
            if job.stage is Stage.RUNNING:
                sits = job.first_token_at is not None or job.engine_id in self._seated
                (seated if sits else waiting).append(job)
        free = self._slots - sum(job.slots for job in seated)
        waiting.sort(key=lambda job: _RANK.get(job.claimed.priority, 1))
        while waiting and free > 0:
            free -= waiting[0].slots
            seated.append(waiting.pop(0))
        self._seated = {job.engine_id for job in seated}
        return seated, waiting

    def _missing(self, seated: list[Job]) -> int:
        """Slots that urgent jobs of several choices lack: some of their choices have begun."""
        beyond = sum(job.slots for job in seated) - self._slots
        return max(0, min(beyond, sum(job.slots - 1 for job in seated if _is_urgent(job))))

    def _some_may(self, jobs: list[Job]) -> bool:
        return any(self._may(job) for job in jobs)

    def _may(self, job: Job) -> bool:
        claimed = job.claimed
        may = claimed.priority == LOWEST and not claimed.by_right
        return may and claimed.preempted < self._most

    def _by_loss(self, jobs: list[Job]) -> list[Job]:
        """Those that may make way: least to compute again first, then the youngest."""
        able = [job for job in reversed(jobs) if self._may(job)]
        return sorted(able, key=lambda job: job.computed)


def _is_urgent(job: Job) -> bool:
    """Whether batch jobs make way for it."""
    return job.claimed.priority != LOWEST
