"""Jobs that Redis knows no more while they run here: whose they are, and what is in them."""

from __future__ import annotations

import asyncio

from tokenfleet.worker.queue import JobQueue


async def test_a_forgotten_job_is_given_back_with_what_it_had(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "ab")
    await until(lambda: fleet.shows(job, "ab"))
    await _forget(fleet, job)
    fleet.engine.say(job, "cd", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "abcd"


async def test_a_job_whose_lease_is_over_is_not_given_back(fleet, until) -> None:
    """It may have ended elsewhere so long ago that its result is gone: it would run once more."""
    worker = fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    worker.roster.get(job).lease_until = 0.0
    await _forget(fleet, job)
    fleet.engine.say(job, "ab")
    await until(lambda: len(worker.roster) == 0)
    assert await fleet.state(job) == ""


async def test_a_job_without_a_token_is_given_back_as_soon_as_redis_is_there_again(
    fleet, until
) -> None:
    """Its lease is renewed minutes later only."""
    worker = fleet.worker(lease_s=1800.0)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    await _forget(fleet, job)
    await fleet.redis.client_kill_filter(_type="normal", skipme=True)  # as a restart does
    await until(lambda: fleet.is_(job, "running"))
    assert worker.roster.get(job) is not None
    fleet.engine.say(job, "ab", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "ab"


async def test_what_was_on_its_way_when_redis_forgot_the_job_is_not_lost(
    fleet, until, monkeypatch
) -> None:
    emit = JobQueue.emit
    offered = asyncio.Event()

    async def overtaken(self, emissions):
        """Logged, then forgotten, which a renewal tells before the reply of the emit is there."""
        outcome = await emit(self, emissions)
        if not offered.is_set():
            await _forget(fleet, job)
            worker.parts.dispatcher.fenced(worker.roster.get(job))
            offered.set()
            for _ in range(50):  # an offer made now would be answered by then
                await fleet.redis.ping()
        return outcome

    monkeypatch.setattr(JobQueue, "emit", overtaken)
    worker = fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "ab")
    await offered.wait()
    fleet.engine.say(job, "cd", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert await fleet.text(job) == "abcd"


async def _forget(fleet, job: str) -> None:
    keys = fleet.connection.keys(0)
    await fleet.redis.delete(keys.job(job), keys.events(job))
