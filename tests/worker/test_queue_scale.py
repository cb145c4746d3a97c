"""Many jobs: none lost while they wait, nothing left when they are done."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from tokenfleet.producer.protocol import Choice, Event, JobResult
from tokenfleet.worker.claims import flat

LONG = os.environ.get("TOKENFLEET_CHAOS") == "long"
WAITING = 50_000 if LONG else 10_000
BATCH = 2_500
RESULT = JobResult(choices=(Choice(text="a", token_ids=(1,), finish_reason="length"),))


@pytest.mark.chaos
async def test_a_long_queue_loses_nothing(valkey_lab):
    """However slow the worker is: what waits is never trimmed."""
    client, queue = valkey_lab.client(), await valkey_lab.queue()
    jobs, found = [], []
    for _ in range(WAITING // BATCH):
        jobs += await client.submit_many([{"model": "m", "prompt": "x"}] * BATCH)
        found += [job.id for job in await queue.claim(1)]
    assert (await queue.backlog())["default"] == WAITING - len(found)
    while claimed := await queue.claim(128):
        found += [job.id for job in claimed]
    assert sorted(found) == sorted(job.id for job in jobs)


async def test_jobs_that_are_done_leave_nothing_behind_when_their_time_is_over(valkey_lab):
    lab = valkey_lab
    queue = await lab.queue(result_ttl_s=0.05, log_ttl_s=0.05)
    await lab.client().submit_many(
        [
            {"model": "m", "prompt": "x", "idempotency_key": f"k{n}", "deadline_s": 60}
            for n in range(500)
        ]
    )
    for _ in range(4):
        jobs = await queue.claim(128)
        event = Event(offset=0, token_ids=(1,), text="a", attempt=1)
        assert all(
            await asyncio.gather(*(queue.finish(job, flat([event]), RESULT) for job in jobs))
        )
    assert await lab.entries() == 0

    async def only_queues_left() -> bool:
        keys = await lab.raw.keys(f"{lab.keys.prefix}:*")
        return all(key.startswith(f"{lab.keys.prefix}:q:".encode()) for key in keys)

    await lab.until(only_queues_left)


async def test_a_claim_asks_for_more_than_one_script_may_carry(valkey_lab):
    client = valkey_lab.client()
    await client.submit_many([{"model": "m", "prompt": "x"}] * 300)
    queue = await valkey_lab.queue()
    assert len(await queue.claim(300)) == 300


async def test_memory_is_back_to_within_five_percent_when_the_results_have_expired(bare_lab):
    """Many tiny jobs from submission to expiry leave queue streams empty and no memory behind."""
    lab = bare_lab
    queue = await lab.queue(result_ttl_s=0.05, log_ttl_s=0.05)

    async def memory() -> int:
        return int((await lab.raw.info("memory"))["used_memory"])

    async def round_of(count: int) -> None:
        await lab.client().submit_many([{"model": "m", "prompt": "x"}] * count)
        while jobs := await queue.claim(32):
            event = Event(offset=0, token_ids=(1,), text="a", attempt=1)
            await asyncio.gather(*(queue.finish(job, flat([event]), RESULT) for job in jobs))
        assert await lab.entries() == 0
        await lab.until(lambda: _only_queues(lab))

    async def is_back() -> bool:
        return await memory() <= 1.05 * before

    await round_of(500)
    before = await memory()
    await round_of(3_000)
    await lab.until(is_back)  # tables shrink little by little


async def _only_queues(lab: Any) -> bool:
    return await lab.raw.dbsize() == len(await lab.raw.keys(f"{lab.keys.prefix}:q:*"))
