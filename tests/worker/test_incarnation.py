"""Which process a worker id belongs to: of two that run, one; of one that was killed, the next."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tokenfleet.worker import presence
from tokenfleet.worker.broker import Broker
from tokenfleet.worker.incarnation import Incarnation, WorkerIdTaken
from tokenfleet.worker.presence import Presence


def gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def present(queue: Any) -> Presence:
    return Presence(queue, Broker(), about=dict, on_registered=lambda: None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "LOOK_S", 0.01)


async def test_a_line_of_another_incarnation_is_left_alone_and_named(valkey_lab):
    queue = await valkey_lab.queue()
    first, second = Incarnation(), Incarnation(host="elsewhere", pid=7)
    await queue.heartbeat(first.as_line())
    await queue.heartbeat(first.as_line())
    with pytest.raises(WorkerIdTaken, match="worker_id w1 is that of another") as refused:
        await queue.heartbeat(second.as_line())
    assert refused.value.holder == first
    line = await valkey_lab.raw.hgetall(valkey_lab.keys.worker("w1"))
    assert line[b"incarnation"].decode() == first.key
    await queue.leave()
    await queue.heartbeat(second.as_line())


async def test_a_worker_whose_id_a_live_one_has_ends_and_has_not_been_named(valkey_lab, until):
    queue, other = await valkey_lab.queue(), await valkey_lab.queue()
    alive = Incarnation(host="elsewhere")
    await other.heartbeat(alive.as_line())
    late = present(queue)
    run = asyncio.ensure_future(late.run())
    await until(lambda: late._held_at is not None)
    while not run.done():
        await other.heartbeat(alive.as_line())
        await asyncio.sleep(0.005)
    with pytest.raises(WorkerIdTaken, match="elsewhere"):
        await run
    assert not late.named.is_set()


async def test_the_id_of_one_that_was_killed_elsewhere_is_free_when_its_line_runs_out(
    valkey_lab, until
):
    queue = await valkey_lab.queue()
    await queue.heartbeat(Incarnation(host="elsewhere").as_line())
    late = present(queue)
    run = asyncio.ensure_future(late.run())
    await until(lambda: late._held_at is not None)
    assert not late.named.is_set()
    await valkey_lab.raw.pexpire(valkey_lab.keys.worker("w1"), 1)
    await late.named.wait()
    assert late.registered
    run.cancel()


async def test_the_id_of_one_that_was_killed_here_is_free_at_once(valkey_lab):
    queue = await valkey_lab.queue()
    await queue.heartbeat(replace(Incarnation(), pid=gone()).as_line())
    late = present(queue)
    run = asyncio.ensure_future(late.run())
    await late.named.wait()
    assert late._held_at is None
    assert late.registered
    run.cancel()


async def test_a_worker_that_finds_its_own_line_taken_ends(valkey_lab, monkeypatch):
    """It was away for so long that another one has its id."""
    monkeypatch.setattr(presence, "HEARTBEAT_S", 0.01)
    queue = await valkey_lab.queue()
    first = present(queue)
    run = asyncio.ensure_future(first.run())
    await first.named.wait()
    await queue.take_over()
    while not run.done():
        try:
            await queue.heartbeat(Incarnation(host="elsewhere").as_line())
        except WorkerIdTaken:  # it was back first
            await queue.take_over()
        await asyncio.sleep(0.02)
    with pytest.raises(WorkerIdTaken):
        await run


def test_only_a_process_that_can_be_looked_for_is_known_to_have_ended():
    here, pid = Incarnation(), gone()
    assert here.knows_ended(replace(here, key="other", pid=pid))
    assert not here.knows_ended(replace(here, key="other"))
    for elsewhere in ({"pid": -1}, {"pid": pid, "host": "x"}, {"pid": pid, "pids": "pid:[1]"}):
        assert not here.knows_ended(replace(here, key="other", **elsewhere))
