"""Whole workers full of batch jobs, and urgent ones that keep coming."""

from __future__ import annotations

import asyncio


async def test_urgent_jobs_pass_batch_jobs_that_lose_no_token_also_when_a_worker_dies(
    fleet, until, tools
) -> None:
    settings = {"max_num_seqs": 4, "max_preemptions": 2}
    settings |= {"simulated_step_ms": 12}
    workers = [await fleet.start(**settings) for _ in range(2)]
    lengths = [300 + 15 * number for number in range(12)]
    batch = [
        await fleet.submit(f"batch {number} ", length, priority="batch")
        for number, length in enumerate(lengths)
    ]
    following = asyncio.ensure_future(fleet.follow(*batch))
    await until(lambda: _all_slots_taken(batch, 8))
    asked = 0
    while asked < 10 or not (await _put_back(fleet, batch) or await _all_ended(batch)):
        priority = ("interactive", "default")[asked % 2]
        job = await fleet.submit(f"now {asked} ", 10, priority=priority)
        (followed,) = await fleet.follow(job)
        assert followed.text == tools.repeated(f"now {asked} ", 10)
        if asked == 4:
            await workers[0].kill()
            workers.append(await fleet.start(**settings))
        asked += 1
    for number, (one, length) in enumerate(zip(await following, lengths)):
        assert one.text == tools.repeated(f"batch {number} ", length)
    put_back = await _put_back(fleet, batch)
    print(f"{asked} urgent jobs, {sum(put_back)} times a batch job made way, no token lost")
    assert put_back
    assert max(put_back) <= 2
    assert await fleet.pending() == 0


async def _put_back(fleet, jobs) -> list[int]:
    """How often each of those that made way did so."""
    redis = fleet.client.link.connection.client
    keys = [f"{{tokenfleet:0}}:j:{job.id}" for job in jobs]
    return [times for key in keys if (times := int(await redis.hget(key, "preempted") or 0))]


async def _all_ended(jobs) -> bool:
    return all([(await job.status()).state.terminal for job in jobs])


async def _all_slots_taken(jobs, slots: int) -> bool:
    return sum([(await job.status()).offset > 0 for job in jobs]) >= slots
