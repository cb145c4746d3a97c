"""Emitting: every event once, under the current attempt only."""

from __future__ import annotations

from typing import Any

import pytest

from tokenfleet.producer.protocol import Choice, Event, JobResult
from tokenfleet.worker.claims import flat

RESULT = JobResult(choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="length"),))


async def test_an_emission_repeated_after_a_lost_reply_is_logged_once(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    events = (lab.token(0, 1), Event(offset=1, text="held", attempt=1), lab.token(1, 2, 3))
    for _ in range(3):
        outcome = await queue.emit([lab.emission(job, 0, *events)])
        assert not outcome.behind
        assert not outcome.fenced
    assert tuple(await lab.log(job_id)) == events


async def test_an_emission_merged_with_later_events_continues_where_the_log_ends(lab):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    await queue.emit([lab.emission(job, 0, lab.token(0, 1))])
    await queue.emit([lab.emission(job, 0, lab.token(0, 1), lab.token(1, 2), lab.token(2, 3))])
    assert [event.offset for event in await lab.log(job_id)] == [0, 1, 2]


@pytest.mark.parametrize("start", [1, 5])
async def test_an_emission_that_does_not_meet_the_end_of_the_log_is_behind(lab, start):
    queue = await lab.queue()
    job_id = await lab.submit()
    (job,) = await queue.claim(1)
    await queue.emit([lab.emission(job, 0, lab.token(0, 1, 2, 3))])
    outcome = await queue.emit([lab.emission(job, start, lab.token(start, 9, 9, 9))])
    assert outcome.behind == {job_id}
    assert outcome.logged == {job_id: 3}
    assert len(await lab.log(job_id)) == 1


async def test_a_zombie_can_neither_emit_nor_finish_nor_release_nor_fail(lab):
    zombie_queue, queue = await lab.queue("zombie"), await lab.queue("w2")
    job_id = await lab.submit()
    (zombie,) = await zombie_queue.claim(1)
    await lab.expire_lease(zombie)
    assert await queue.reclaim() == 1
    (job,) = await queue.claim(1)
    outcome = await zombie_queue.emit([lab.emission(zombie, 0, lab.token(0, 666))])
    assert outcome.fenced == {job_id}
    assert await zombie_queue.renew([zombie]) == {job_id}
    assert not await zombie_queue.finish(zombie, flat([lab.token(0, 666)]), RESULT)
    assert await zombie_queue.release([zombie], "test") == frozenset()
    assert await zombie_queue.fail(zombie, "c", "m", retryable=True) is None
    assert await lab.log(job_id) == []
    assert (await lab.fields(job_id))["owner"] == "w2"
    assert await queue.finish(job, flat([lab.token(0, 1, attempt=2)]), RESULT)


async def test_one_call_settles_each_job_on_its_own(lab):
    queue = await lab.queue()
    for _ in range(3):
        await lab.submit()
    good, behind, fenced = await queue.claim(3)
    await queue.finish(fenced, [], RESULT)
    outcome = await queue.emit(
        [
            lab.emission(behind, 4, lab.token(4)),
            lab.emission(fenced, 0, lab.token(0)),
            lab.emission(good, 0, lab.token(0)),
        ]
    )
    assert (outcome.behind, outcome.fenced) == ({behind.id}, {fenced.id})
    assert len(await lab.log(good.id)) == 1


async def test_256_jobs_are_emitted_in_one_call(lab):
    queue = await lab.queue()
    for _ in range(256):
        await lab.submit()
    jobs = await queue.claim(128) + await queue.claim(128)
    before = await _calls(lab)
    outcome = await queue.emit([lab.emission(job, 0, lab.token(0, 1, 2, 3)) for job in jobs])
    assert (outcome.behind, outcome.fenced) == (frozenset(), frozenset())
    assert await _calls(lab) - before <= 2  # EVALSHA, and EVAL where the script was not known


async def _calls(lab: Any) -> int:
    stats = await lab.raw.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))
