"""In which order the classes of jobs are served, so that urgent jobs go first and none starves.

Every class but the first earns a floor: a share of the jobs claimed. What it has earned is offered
to it before anyone else; everything beyond goes strictly by urgency.

Invariant: a class that always has jobs waiting gets at least its floor of the claims, and a class
cannot save up more than one claim's worth while it has nothing to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tokenfleet.producer.keys import PRIORITIES
from tokenfleet.worker.claims import ClaimedJob

FLOORS: Mapping[str, float] = {"interactive": 0.0, "default": 0.15, "batch": 0.05}
"""Share of the claims that a class gets even when more urgent ones never end."""


@dataclass(frozen=True, slots=True)
class Offer:
    """At most `count` jobs from the queues of `priority`."""

    priority: str
    count: int


class ClassOrder:
    """Plans claims, and learns from what they brought. One per worker."""

    def __init__(self, floors: Mapping[str, float] = FLOORS) -> None:
        self._floors = dict(floors)
        self._earned = dict.fromkeys(PRIORITIES, 0.0)

    def plan(self, count: int) -> list[Offer]:
        """Offers for a claim of up to `count` jobs: what was earned first, then by urgency."""
        earned = [Offer(p, due) for p, due in self._due(count).items() if due]
        return earned + [Offer(priority, count) for priority in PRIORITIES]

    def settle(
        self, jobs: list[ClaimedJob], by_class: Mapping[str, int], *, count: int
    ) -> list[ClaimedJob]:
        """Account for what a claim of up to `count` brought.

        Returns the same jobs; those that came before more urgent ones that waited are marked.
        """
        earned = self._due(count) if sum(by_class.values()) == count else {}
        self.claimed(by_class, count=count)
        return _by_right(jobs, earned)

    def claimed(self, by_class: Mapping[str, int], *, count: int) -> None:
        """Account for a claim of up to `count` jobs that brought `by_class`.

        A class that did not use what it was offered has nothing waiting: it is owed nothing.
        """
        total = sum(by_class.values())
        for priority, due in self._due(count).items():
            brought = by_class.get(priority, 0)
            earned = self._earned[priority] + self._floors[priority] * total - brought
            waits = total == count and brought >= due
            self._earned[priority] = min(max(earned, 0.0), count + 1.0) if waits else 0.0

    def _due(self, count: int) -> dict[str, int]:
        """Whole jobs that each class has earned, the least urgent first, `count` in all."""
        due = {}
        for priority in reversed(PRIORITIES):
            due[priority] = min(count, int(self._earned[priority]))
            count -= due[priority]
        return due


def _by_right(jobs: list[ClaimedJob], earned: dict[str, int]) -> list[ClaimedJob]:
    """The same jobs; the first `earned` ones of each class are marked: others waited meanwhile."""
    left = Counter({priority: count for priority, count in earned.items() if count})
    if not left:
        return jobs
    marked = []
    for job in jobs:
        mine = left[job.priority] > 0
        left[job.priority] -= mine
        marked.append(replace(job, by_right=True) if mine else job)
    return marked
