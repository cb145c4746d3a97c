"""A Redis that is slow, silent, restarted or emptied, with a proxy in between."""

from __future__ import annotations

import asyncio

from tokenfleet.producer import JobExpired
from tokenfleet.producer.embedded import EmbeddedServer


async def test_over_a_slow_line_deltas_merge_and_nothing_is_lost(
    valkey, proxy_to, site_at, until, answer
) -> None:
    """Each way takes 60 ms: the engine is not slowed, there are fewer and longer events."""
    proxy = await proxy_to(valkey.port)
    site = site_at(valkey.url, worker_url=proxy.url)
    worker = site.worker(step_s=0.002, flush_interval_ms=0)
    quick = [await site.submit(f"job {i} ", 200) for i in range(8)]
    before = await asyncio.gather(*map(site.follow, quick))
    proxy.delay_s = 0.06
    steps = worker.engine.steps
    slow = [await site.submit(f"job {i} ", 200) for i in range(8)]
    after = await asyncio.gather(*map(site.follow, slow))
    assert worker.engine.steps - steps < 2 * steps  # one token a step all the same
    for number, events in enumerate(after):
        assert "".join(e.text for e in events) == answer(f"job {number} ", 200)
    assert sum(map(len, after)) < sum(map(len, before))
    assert {(await job.status()).attempt for job in slow} == {1}


async def test_leases_hold_over_a_slow_line(valkey, proxy_to, site_at, until, answer) -> None:
    """Also that of a connection's making, which takes several trips; a second worker's reaper
    watches."""
    proxy = await proxy_to(valkey.port)
    site = site_at(valkey.url, worker_url=proxy.url)
    site.worker(lease_s=8, step_s=0.018)
    jobs = [await site.submit(f"job {i} ", 500) for i in range(4)]
    following = asyncio.gather(*map(site.follow, jobs))
    await until(lambda: _all_started(jobs))
    proxy.delay_s = 0.06
    site.worker(lease_s=8, step_s=0.018)
    for number, events in enumerate(await following):
        assert "".join(e.text for e in events) == answer(f"job {number} ", 500)
    assert {(await job.status()).failures for job in jobs} == {0}
    assert {(await job.status()).attempt for job in jobs} == {1}


async def test_a_line_that_falls_silent_within_the_lease_costs_no_token(
    valkey, proxy_to, site_at, until, answer
) -> None:
    """Longer than the socket's time limit, so that calls fail and are made again."""
    proxy = await proxy_to(valkey.port)
    site = site_at(valkey.url, worker_url=proxy.url)
    worker = site.worker(lease_s=60, step_s=0.005)
    jobs = [await site.submit(f"job {i} ", 600) for i in range(4)]
    following = asyncio.gather(*map(site.follow, jobs))
    await until(lambda: _all_started(jobs))
    proxy.hang()
    await until(lambda: "Redis is not reachable" in worker.service.not_ready())
    proxy.flow()
    for number, events in enumerate(await following):
        assert "".join(e.text for e in events) == answer(f"job {number} ", 600)
    assert {(await job.status()).attempt for job in jobs} == {1}
    await until(lambda: worker.service.not_ready() == [])


async def test_a_worker_behind_a_line_that_stays_silent_gives_up_its_jobs(
    valkey, proxy_to, site_at, until, answer
) -> None:
    """Another worker, whose line works, goes on; the silent one publishes nothing more of them."""
    proxy = await proxy_to(valkey.port)
    site = site_at(valkey.url, worker_url=proxy.url)
    silent = site.worker(lease_s=4, step_s=0.01)
    jobs = [await site.submit(f"job {i} ", 500) for i in range(4)]
    following = asyncio.gather(*map(site.follow, jobs))
    await until(lambda: _all_started(jobs))
    before = [(await job.status()).attempt for job in jobs]
    proxy.hang()
    await until(lambda: len(silent.service.roster) == 0)  # before anyone else can have them
    site.worker_url = valkey.url
    site.worker(lease_s=4, step_s=0.002)
    for number, events in enumerate(await following):
        assert "".join(e.text for e in events) == answer(f"job {number} ", 500)
        assert events[-1].attempt > before[number]
    proxy.flow()
    proxy.cut()  # what hung arrives no more


async def test_without_a_file_a_restart_forgets_what_waits_and_keeps_what_runs(
    site_at, until, answer
) -> None:
    with EmbeddedServer() as server:
        site = site_at(server.url)
        site.worker(max_num_seqs=2, lease_s=4, step_s=0.005)
        running = [await site.submit(f"job {i} ", 400) for i in range(2)]
        await until(lambda: _all_started(running))
        waiting = await site.submit("waits ", 10)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        for number, job in enumerate(running):  # adopted: the log is written again
            await until(lambda job=job: _state(job, "finished"))
            assert (await job.result()).text == answer(f"job {number} ", 400)
            assert (await job.status()).attempt == 2
        assert await _state(waiting, "expired-from-redis")
        await site.follow(await site.submit("later ", 10))


async def _all_started(jobs) -> bool:
    return all([(await job.status()).offset > 20 for job in jobs])


async def _state(job, state: str) -> bool:
    """`expired-from-redis`: Redis does not know the job."""
    try:
        return (await job.status()).state == state
    except JobExpired:
        return state == "expired-from-redis"
