"""Weighted classes: urgent first, and a floor for the rest."""

from __future__ import annotations

from collections import Counter

import pytest

from tokenfleet.producer.keys import PRIORITIES
from tokenfleet.worker.priorities import FLOORS, ClassOrder


def serve(order: ClassOrder, waiting: dict[str, int], count: int) -> Counter[str]:
    """What a claim of `count` would bring from queues that hold `waiting`."""
    brought: Counter[str] = Counter()
    for offer in order.plan(count):
        room = min(offer.count, count - brought.total(), waiting[offer.priority])
        brought[offer.priority] += room
        waiting[offer.priority] -= room
    order.claimed(brought, count=count)
    return brought


@pytest.mark.parametrize("count", [1, 3, 16, 64])
def test_no_class_starves_under_endless_urgent_jobs(count):
    order = ClassOrder()
    served: Counter[str] = Counter()
    for _ in range(2000 // count + 1):
        served += serve(order, dict.fromkeys(PRIORITIES, 10_000), count)
    for priority in ("default", "batch"):
        assert served[priority] >= FLOORS[priority] * served.total() - count - 1
    assert served["interactive"] >= 0.75 * served.total()


def test_urgency_decides_where_nothing_is_owed():
    assert serve(ClassOrder(), {"interactive": 2, "default": 2, "batch": 2}, 4) == {
        "interactive": 2,
        "default": 2,
        "batch": 0,
    }


def test_a_class_that_waited_with_nothing_to_run_saves_up_no_burst():
    order = ClassOrder()
    for _ in range(1000):
        serve(order, {"interactive": 8, "default": 0, "batch": 0}, 8)
    now = serve(order, dict.fromkeys(PRIORITIES, 100), 8)
    assert now["interactive"] >= 6


def test_a_claim_that_emptied_the_queues_settles_all_debts():
    order = ClassOrder()
    for _ in range(20):
        serve(order, {"interactive": 100, "default": 0, "batch": 0}, 4)
    serve(order, {"interactive": 1, "default": 0, "batch": 0}, 4)
    assert order.plan(1)[0].priority == "interactive"


async def test_the_floor_holds_on_a_real_queue(lab):
    queue = await lab.queue()
    for _ in range(60):
        await lab.submit(priority="interactive")
    batch = [await lab.submit(priority="batch") for _ in range(3)]
    claimed = [job for _ in range(30) for job in await queue.claim(2)]
    assert {batch[0], batch[1]} <= {job.id for job in claimed}
    for job in claimed:  # urgent ones wait all the time: what else came, came for the floor
        assert job.by_right is (job.priority == "batch")


async def test_a_job_that_came_because_nothing_else_waits_came_for_no_floor(lab):
    queue = await lab.queue()
    for _ in range(40):
        await lab.submit(priority="batch")
    claimed = [job for _ in range(10) for job in await queue.claim(4)]
    assert len(claimed) == 40
    assert not any(job.by_right for job in claimed)
