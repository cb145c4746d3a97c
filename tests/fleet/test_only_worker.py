"""The only worker is killed with all of its slots taken."""

from __future__ import annotations

import asyncio


async def test_64_jobs_survive_the_kill_of_the_only_worker(fleet, until, tools) -> None:
    jobs = [await fleet.submit(f"job {number} ", 240 + number) for number in range(64)]
    worker = await fleet.start(max_num_seqs=64, prefetch=0, simulated_step_ms=60)
    following = asyncio.ensure_future(fleet.follow(*jobs))
    await until(lambda: _running(fleet, worker, 64))
    await until(lambda: _has_begun(jobs[-1]))
    await worker.kill()
    await fleet.start(max_num_seqs=64, prefetch=0)
    for number, followed in enumerate(await following):
        assert followed.text == tools.repeated(f"job {number} ", 240 + number)
    states = {(await job.status()).state for job in jobs}
    assert states == {"finished"}
    assert await fleet.pending() == 0


async def _running(fleet, worker, count: int) -> bool:
    return await fleet.pending(worker) == count


async def _has_begun(job) -> bool:
    return (await job.status()).offset > 0
