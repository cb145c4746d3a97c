"""A fleet seen from outside: what a look finds, and that a look changes nothing."""

from __future__ import annotations

from typing import Any

from tokenfleet.producer.fleet import FleetReader
from tokenfleet.producer.fleet_view import QueueDepth


class Clock:
    """Monotonic seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_look_finds_workers_queues_and_counts(lab: Any) -> None:
    queue = await lab.queue()
    await queue.heartbeat({"slots": 8, "running": 2, "engine": "ready", "tokens_per_s": 12.5})
    for _ in range(3):
        await lab.submit()
    await lab.submit(delay_s=60)
    first, _ = await queue.claim(2)
    await queue.release([first], "drain")
    status = await FleetReader(lab.connection).status()
    (worker,) = status.workers
    assert (worker.worker, worker.model, worker.state) == ("w1", "m", "ready")
    assert (worker.slots, worker.running, worker.tokens_per_s) == (8, 2, 12.5)
    depths = {depth.priority: depth for depth in status.queues}
    assert (depths["default"].waiting, depths["default"].front) == (2, 1)
    assert (status.waiting, status.running, status.delayed, status.dead) == (2, 1, 1, 0)
    assert status.tokens_per_s == 12.5


async def test_a_line_of_another_version_is_read_with_care(valkey_lab: Any) -> None:
    queue = await valkey_lab.queue()
    await queue.heartbeat({"slots": "many", "tokens_per_s": "nan", "draining": 1, "new": "x"})
    (worker,) = (await FleetReader(valkey_lab.connection).status()).workers
    assert (worker.slots, worker.running, worker.tokens_per_s) == (0, 0, None)
    assert worker.state == "draining"


async def test_running_jobs_name_their_worker_and_none_of_their_words(lab: Any) -> None:
    queue = await lab.queue()
    await lab.submit(prompt="a secret")
    (job,) = await queue.claim(1)
    (running,) = await FleetReader(lab.connection).running()
    assert (running.job_id, running.worker, running.attempt) == (job.id, "w1", 1)
    assert (running.model, running.priority, running.offset) == ("m", "default", 0)
    assert "secret" not in repr(running)


async def test_keys_are_searched_now_and_then_and_known_queues_looked_at_each_time(
    valkey_lab: Any,
) -> None:
    clock = Clock()
    reader = FleetReader(valkey_lab.connection, clock=clock)
    await valkey_lab.submit()
    assert (await reader.status()).waiting == 1
    await valkey_lab.submit()
    await valkey_lab.submit(model="other")
    assert (await reader.status()).waiting == 2, "a known queue is fresh; a new one not yet found"
    clock.now += 10.0
    assert (await reader.status()).waiting == 3


async def test_the_queues_of_a_live_worker_are_known_without_a_search(valkey_lab: Any) -> None:
    clock = Clock()
    reader = FleetReader(valkey_lab.connection, clock=clock)
    await reader.status()
    queue = await valkey_lab.queue(model_name="new")
    await queue.heartbeat({})
    assert QueueDepth("new", "batch") in (await reader.status()).queues


async def test_a_model_is_known_by_a_worker_or_by_its_queue(lab: Any) -> None:
    reader = FleetReader(lab.connection)
    assert not await reader.knows("m")
    await lab.submit()
    assert await reader.knows("m")
    queue = await lab.queue(model_name="served", worker_id="w9")
    await queue.heartbeat({})
    assert await reader.knows("served")
    assert await reader.models() == {"m": 0, "served": 1}


async def test_queues_gone_since_the_search_count_as_empty(valkey_lab: Any) -> None:
    reader = FleetReader(valkey_lab.connection, clock=Clock())
    await valkey_lab.submit()
    await reader.status()
    await valkey_lab.raw.delete(valkey_lab.keys.queue("m", "default"))
    status = await reader.status()
    assert (status.waiting, status.running) == (0, 0)
    assert await reader.running() == []
