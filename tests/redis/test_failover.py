"""A replica is promoted while jobs run: with sentinels, behind a name that moves, in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tokenfleet.producer import JobExpired
from tokenfleet.producer.embedded import EmbeddedServer

from .servers import be_alert

JOBS, TOKENS = 6, 600


class Pair:
    """A master, and a replica that follows it."""

    def __init__(self, master: EmbeddedServer, replica: EmbeddedServer) -> None:
        self.master = master
        self.replica = replica

    async def in_step(self, wait_for: Callable[..., Any]) -> None:
        """Wait until the replica has all that there is."""
        with redis.Redis(port=self.replica.port) as node:
            node.execute_command("REPLICAOF", "127.0.0.1", self.master.port)
            await wait_for(lambda: node.info("replication")["master_link_status"] == "up")

    def heard(self) -> None:
        """Wait until the replica has what was written so far; a link that is up promises less."""
        with redis.Redis(port=self.master.port) as node:
            assert node.execute_command("WAIT", 1, 20_000) == 1

    def promote(self) -> None:
        with redis.Redis(port=self.replica.port) as node:
            node.execute_command("REPLICAOF", "NO", "ONE")

    def demote(self) -> None:
        """The old master follows the new one, as after a planned switch; it stays up."""
        with redis.Redis(port=self.master.port) as node:
            node.execute_command("REPLICAOF", "127.0.0.1", self.replica.port)

    def cut_off(self) -> None:
        """The replica hears nothing more of its master: what is written from here on is lost."""
        with redis.Redis(port=self.replica.port) as node:
            node.execute_command("REPLICAOF", "127.0.0.1", 1)


@pytest.fixture
def pair(redis_binary):
    options = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
    with (
        EmbeddedServer(binary=redis_binary, options=options) as master,
        EmbeddedServer(binary=redis_binary, options=options) as replica,
    ):
        yield Pair(master, replica)


async def running_jobs(site, until, **settings):
    """A worker in the middle of some jobs, and who follows them."""
    worker = site.worker(step_s=0.004, **settings)
    jobs = [await site.submit(f"job {i} ", TOKENS) for i in range(JOBS)]
    following = asyncio.gather(*map(site.follow, jobs))
    await until(lambda: _all_started(jobs))
    return worker, jobs, following


def check(answer, all_events) -> None:
    for number, events in enumerate(all_events):
        assert "".join(e.text for e in events) == answer(f"job {number} ", TOKENS)


async def test_jobs_go_on_when_sentinels_promote_a_replica(
    pair, sentinels, site_at, until, answer
) -> None:
    await pair.in_step(until)
    url = await sentinels(pair.master)
    site = site_at(url)
    worker, _jobs, following = await running_jobs(site, until)
    worker.engine.may_step.clear()  # no job ends before its master does
    await asyncio.to_thread(pair.heard)
    await asyncio.to_thread(be_alert, url)
    await asyncio.to_thread(pair.master.kill)
    worker.engine.may_step.set()
    check(answer, await following)
    with redis.Redis(port=pair.replica.port) as node:
        assert node.info("replication")["role"] == "master"
    later = await site.submit("later ", 20)
    await site.follow(later)
    assert worker.service.not_ready() == []


async def test_jobs_go_on_when_the_name_moves_to_a_promoted_replica(
    pair, proxy_to, site_at, until, answer
) -> None:
    """Without sentinels: a DNS name or a proxy. The old master stays up and refuses writes."""
    await pair.in_step(until)
    proxy = await proxy_to(pair.master.port)
    site = site_at(proxy.url)
    worker, _jobs, following = await running_jobs(site, until)
    worker.engine.may_step.clear()  # no job ends before the name moves
    await asyncio.to_thread(pair.heard)
    pair.promote()
    proxy.target = pair.replica.port  # only new connections are led there
    pair.demote()
    worker.engine.may_step.set()
    check(answer, await following)
    await site.follow(await site.submit("later ", 20))
    assert worker.service.not_ready() == []


async def test_tokens_lost_with_the_old_master_are_made_again_and_seen_once(
    pair, proxy_to, site_at, until, answer
) -> None:
    """Replication is asynchronous: what the replica had not heard of is gone. The worker is told
    that the log is shorter, hands the job back, and the next attempt goes on from there."""
    await pair.in_step(until)
    proxy = await proxy_to(pair.master.port)
    site = site_at(proxy.url)
    worker, jobs, following = await running_jobs(site, until)
    worker.engine.may_step.clear()  # no job ends before the replica is cut off, nor before it leads
    await asyncio.to_thread(pair.heard)
    pair.cut_off()
    before = [(await job.status()).offset for job in jobs]
    worker.engine.may_step.set()
    await until(lambda: _grown(jobs, before, 30))
    worker.engine.may_step.clear()
    pair.promote()
    proxy.target = pair.replica.port
    await asyncio.to_thread(pair.master.kill)
    worker.engine.may_step.set()
    all_events = await following
    check(answer, all_events)
    assert all(events[-1].attempt > 1 for events in all_events)
    assert {(await job.status()).failures for job in jobs} == {0}


async def test_a_job_accepted_in_the_lost_window_is_told_as_expired(
    pair, proxy_to, site_at, until
) -> None:
    await pair.in_step(until)
    proxy = await proxy_to(pair.master.port)
    site = site_at(proxy.url)
    kept = await site.submit("kept ", 10)
    await asyncio.to_thread(pair.heard)
    pair.cut_off()
    lost = await site.submit("lost ", 10)
    pair.promote()
    proxy.target = pair.replica.port
    await asyncio.to_thread(pair.master.kill)
    site.worker()
    await site.follow(kept)
    with pytest.raises(JobExpired):
        await lost.result(timeout_s=240)


async def test_jobs_go_on_when_a_cluster_promotes_a_replica(
    site_at, until, answer, cluster_with_replica
) -> None:
    url, doomed = cluster_with_replica
    site = site_at(url)
    worker, jobs, following = await running_jobs(site, until, lease_s=6)
    worker.engine.may_step.clear()  # no job ends before its master does
    partitions = {int(job.id.rpartition(".")[2]) for job in jobs}
    assert len(partitions) == JOBS
    await asyncio.to_thread(doomed.kill)
    worker.engine.may_step.set()
    check(answer, await following)
    more = [await site.submit("more ", 20) for _ in range(16)]
    await asyncio.gather(*map(site.follow, more))
    cancelled = [await site.submit("endless ", 5000) for _ in range(4)]
    await until(lambda: _all_started(cancelled))
    for job in cancelled:
        await job.cancel()
    for job in cancelled:
        await until(lambda job=job: _state(job, "cancelled"))


async def _all_started(jobs) -> bool:
    return all([(await job.status()).offset > 20 for job in jobs])


async def _grown(jobs, before, by: int) -> bool:
    return all([(await job.status()).offset > at + by for job, at in zip(jobs, before)])


async def _state(job, state: str) -> bool:
    return (await job.status()).state == state
