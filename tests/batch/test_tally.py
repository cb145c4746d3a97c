"""Counting follows from the lines alone; a worker's time counts once, however many jobs it had."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.producer.batch.records import Record
from tokenfleet.producer.batch.tally import Busy, Tally


def record(line: int, begin: int, end: int, worker: str = "w1") -> Record:
    own = {
        "worker": worker, "claimed_ms": begin, "ended_ms": end, "queue_s": 0.5,
        "total_s": 0.5 + (end - begin) / 1000,
    }  # fmt: skip
    usage: dict[str, Any] = {
        "prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    body = {"usage": usage, "tokenfleet": own}
    response = {"status_code": 200, "body": body}
    return Record(line, False, {"custom_id": f"c{line}", "response": response, "error": None})


def tally_of(records: list[Record]) -> Tally:
    tally = Tally()
    for one in records:
        tally.add(one)
    return tally


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
def test_busy_time_is_that_of_the_union(spans: list[tuple[int, int]]) -> None:
    busy = Busy()
    for begin, length in spans:
        busy.add(begin, begin + length)
    covered = {moment for begin, length in spans for moment in range(begin, begin + length)}
    assert busy.total_s == len(covered) / 1000


def test_workers_side_by_side_add_up_and_jobs_side_by_side_on_one_do_not() -> None:
    spans = [(1000, 3000, "w1"), (2000, 4000, "w1"), (1000, 3000, "w2")]
    tally = tally_of([record(number, *span) for number, span in enumerate(spans, 1)])
    assert (tally.worker_s, tally.job_s, tally.num_workers) == (5.0, 6.0, 2)


def test_the_order_of_the_lines_does_not_matter() -> None:
    dice = random.Random(1)
    records = [
        record(number, begin := dice.randrange(1, 10_000), begin + dice.randrange(1, 500))
        for number in range(1, 200)
    ]
    first = tally_of(records)
    dice.shuffle(records)
    second = tally_of(records)
    assert (first.worker_s, first.slowest) == (second.worker_s, second.slowest)
    assert (second.completed, second.prompt_tokens, second.completion_tokens) == (199, 398, 597)
    assert second.cached_tokens == 199


def test_the_slowest_lines_are_those_that_ran_longest_and_not_those_that_waited() -> None:
    tally = tally_of([record(number, 1, 1 + number * 10) for number in range(1, 30)])
    assert [slow.line for slow in tally.slowest] == [29, 28, 27, 26, 25]
