"""Who makes way: a policy over the jobs of one worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tokenfleet.worker.jobs import Stage
from tokenfleet.worker.preemption import Seats
from tokenfleet.worker.roster import Roster


def job(priority: str = "batch", computed: int = 1, **fields: Any) -> Any:
    """A job that holds a slot since its first token, unless `computed` is 0."""
    claimed = SimpleNamespace(
        priority=priority, preempted=fields.pop("preempted", 0), by_right=fields.pop("right", False)
    )
    values = {
        "claimed": claimed,
        "computed": computed,
        "first_token_at": 1.0 if computed else None,
        "slots": 1,
        "stage": Stage.RUNNING,
        **fields,
    }
    found = SimpleNamespace(**values)
    found.engine_id = str(id(found))
    return found


def test_the_one_with_the_least_to_compute_again_comes_first_and_of_equals_the_youngest():
    jobs = [job(computed=9), job(computed=3), job(computed=3), job(computed=7)]
    assert Seats(4, 3).victims(jobs) == [jobs[2], jobs[1], jobs[3], jobs[0]]


def test_jobs_that_hold_slots_come_before_those_that_wait_for_one():
    jobs = [job(computed=50), job(computed=0), job(computed=0, stage=Stage.READY)]
    assert Seats(1, 3).victims(jobs)[0] is jobs[0]
    assert len(Seats(1, 3).victims(jobs)) == 3


@pytest.mark.parametrize(
    "stays",
    [
        {"priority": "default"},
        {"priority": "interactive"},
        {"preempted": 3},
        {"right": True},
        {"stage": Stage.LEAVING},
        {"stage": Stage.ENDED},
    ],
)
def test_a_job_stays_that(stays):
    assert Seats(2, 3).victims([job(**stays), job()])[1:] == []
    assert Seats(2, 3).victims([job(**stays)]) == []


def test_nobody_makes_way_while_slots_are_free():
    jobs = [job(), job("interactive", 0)]
    assert Seats(2, 3).to_make_way(jobs) == []
    assert Seats(1, 3).to_make_way(jobs) == [jobs[0]]


def test_nobody_makes_way_for_a_batch_job():
    assert Seats(1, 3).to_make_way([job(), job(computed=0)]) == []


def test_as_many_slots_come_free_as_the_urgent_ones_need():
    jobs = [job(computed=5), job(computed=6, slots=2), job(computed=7), job("default", 0, slots=3)]
    assert Seats(4, 3).to_make_way(jobs) == jobs[:2]


def test_a_batch_job_that_began_before_an_urgent_one_came_is_known_to_hold_its_slot():
    seats, first, urgent = Seats(1, 3), job(computed=0), job("interactive", 0)
    assert seats.to_make_way([first]) == []  # its prompt is being computed
    assert seats.to_make_way([first, urgent]) == [first]


def test_a_prefetched_batch_job_does_not_count_as_being_in_the_way():
    jobs = [job("interactive"), job(computed=0), job("interactive", 0)]
    assert Seats(1, 3).to_make_way(jobs) == []


def test_an_urgent_job_that_has_some_of_its_slots_gets_the_others_too():
    seats, jobs = Seats(4, 3), [job(), job(), job(computed=5), job("interactive", 0, slots=3)]
    assert seats.to_make_way(jobs) == [jobs[1], jobs[0]]
    assert Seats(4, 3).to_make_way([*jobs[:3], job(slots=3)]) == []  # a batch job waits for its own


async def test_a_change_between_the_wish_to_wait_and_the_wait_is_not_slept_through():
    roster = Roster(1, 0)
    waiting = asyncio.ensure_future(roster.change())
    roster.touch()
    another = asyncio.ensure_future(roster.change())
    await waiting
    assert not another.done()
    roster.touch()
    await another
