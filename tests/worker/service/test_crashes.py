"""A worker that dies between any two of its moves: the job's next worker goes on, nothing is seen.

The dead worker is cut off from Redis at the named move, before it or after it (its reply is never
heard), so that not one of its later words arrives; then the leases of what it held run out.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenfleet.producer.errors import BrokerUnavailable

TEXT = "abcdef"
CALLS = ("claim", "swap", "renew", "emit", "finish", "release", "fail", "adopt", "reclaim")
CALLS += ("repair", "release_phantoms", "heartbeat", "leave")


class Mortal:
    """Lets a worker's calls through until the nth one of a kind, and none from there on."""

    def __init__(self, worker: Any, move: str, when: str, nth: int) -> None:
        self.dead = asyncio.Event()
        self._move, self._when, self._left = move, when, nth
        for name in CALLS:
            setattr(worker.parts.queue, name, self._guard(name, getattr(worker.parts.queue, name)))

    def _guard(self, name: str, real: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            fatal = not self.dead.is_set() and name == self._move and self._strikes()
            if fatal and self._when == "after":
                await real(*args, **kwargs)
            if fatal:
                self.dead.set()
            if self.dead.is_set():
                if name == "leave":  # it is asked while the pieces are picked up
                    raise BrokerUnavailable("a dead worker leaves without a word")
                await asyncio.Event().wait()
            return await real(*args, **kwargs)

        return call

    def _strikes(self) -> bool:
        self._left -= 1
        return self._left == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("move", "nth"),
    [
        *(("heartbeat", 1), ("claim", 1), ("renew", 1), ("emit", 1), ("emit", 2), ("finish", 1)),
        *(("release", 1), ("fail", 1)),
    ],
)
async def test_a_worker_may_die_before_and_after_each_of_its_moves(
    fleet, until, often_renewed, move: str, nth: int, when: str
) -> None:
    job = await fleet.submit()
    doomed = fleet.worker(grace_s=0)
    mortal = Mortal(doomed, move, when, nth)
    await until(lambda: mortal.dead.is_set() or fleet.has(job))
    for piece in ("a", "bc"):
        if not mortal.dead.is_set():
            fleet.engine.say(job, piece)
            so_far = TEXT[: TEXT.index(piece) + len(piece)]
            await until(lambda text=so_far: mortal.dead.is_set() or fleet.shows(job, text))
    if move == "release":
        doomed.drain()
    elif move == "fail":
        fleet.engine.die()
    elif move == "finish":
        fleet.engine.say(job, "def", "stop")
    await mortal.dead.wait()
    fleet.runs[-1].cancel()
    await asyncio.gather(fleet.runs[-1], return_exceptions=True)

    await fleet.end_leases()
    lives = len(fleet.engines)
    fleet.worker()
    await until(lambda: _ended_or_taken(fleet, job, lives))
    if not await fleet.is_(job, "finished"):
        resume = fleet.engine.requests[job].resume or ((),)
        fleet.engine.say(job, TEXT[len(resume[0]) :], "stop")
    await until(lambda: fleet.is_(job, "finished"))
    result, log = await fleet.result(job), await fleet.log(job)
    assert result.text == await fleet.text(job) == TEXT
    assert bytes(token for event in log for token in event.token_ids).decode() == TEXT
    assert [event.offset for event in log] == [0, *(event.end for event in log)][:-1]
    assert [event.final for event in log] == [False] * (len(log) - 1) + [True]
    assert await fleet.pending() == 0


async def _ended_or_taken(fleet, job: str, lives: int) -> bool:
    return (len(fleet.engines) > lives and fleet.has(job)) or await fleet.is_(job, "finished")
