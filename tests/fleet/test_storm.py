"""Everything at once: workers, engines, connections and Redis itself fail while many jobs run.

Short by default; TOKENFLEET_CHAOS=long for the long form. Both print how often each fault struck.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter

import pytest
from redis.exceptions import RedisError

from tokenfleet.producer import AsyncClient, SamplingParams

LONG = os.environ.get("TOKENFLEET_CHAOS") == "long"
JOBS, SUBSCRIBERS, WORKERS, LULL_S = (500, 8, 3, 0.7) if LONG else (96, 8, 3, 0.5)
LEAST = 6
"""Faults that have to strike."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200 if LONG else 300)]


class Storm:
    """Strikes at random until it is told to stop."""

    def __init__(self, fleet, tools, workers) -> None:
        self.struck: Counter[str] = Counter()
        self.over = False
        self._fleet = fleet
        self._tools = tools
        self._workers = workers
        self._stopped: set[int] = set()
        self._sleepers: set[asyncio.Task[None]] = set()

    async def rage(self) -> None:
        faults = [
            self.worker_killed,
            self.worker_killed,
            self.worker_stopped_past_its_lease,
            self.engine_killed,
            self.engine_killed,
            self.connections_killed,
            self.scripts_flushed,
            self.redis_restarted,
        ]
        each_once = self._fleet.random.sample(sorted(set(faults), key=faults.index), 6)
        while not self.over:
            await asyncio.sleep(self._fleet.random.uniform(0.2, 1.0) * LULL_S)
            fault = each_once.pop() if each_once else self._fleet.random.choice(faults)
            if await fault():
                self.struck[fault.__name__] += 1

    async def calm(self) -> None:
        """Let everything that was stopped go on."""
        await asyncio.gather(*self._sleepers)

    def _victim(self) -> int:
        return self._fleet.random.randrange(len(self._workers))

    async def worker_killed(self) -> bool:
        number = self._victim()
        if number in self._stopped:
            return False
        await self._workers[number].kill()
        self._workers[number] = self._fleet.spawn(max_failures=1000)
        await self._workers[number].start()
        return True

    async def worker_stopped_past_its_lease(self) -> bool:
        number = self._victim()
        if number in self._stopped or not self._workers[number].alive:
            return False
        pid = self._workers[number].pid
        self._stopped.add(number)
        os.kill(pid, signal.SIGSTOP)

        async def wake() -> None:
            await asyncio.sleep(2.0)
            os.kill(pid, signal.SIGCONT)
            self._stopped.discard(number)

        self._sleepers.add(asyncio.ensure_future(wake()))
        return True

    async def engine_killed(self) -> bool:
        with contextlib.suppress(LookupError, ProcessLookupError, FileNotFoundError):
            os.kill(self._tools.engine_pid(self._workers[self._victim()]), signal.SIGKILL)
            return True
        return False

    async def connections_killed(self) -> bool:
        with contextlib.suppress(RedisError, OSError):
            redis = self._fleet.client.link.connection.client
            for kind in ("normal", "pubsub"):
                await redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            return True
        return False

    async def scripts_flushed(self) -> bool:
        with contextlib.suppress(RedisError, OSError):
            await self._fleet.client.link.connection.client.script_flush()
            return True
        return False

    async def redis_restarted(self) -> bool:
        await asyncio.to_thread(self._fleet.server.kill)
        await asyncio.to_thread(self._fleet.server.start)
        return True


async def test_nothing_is_lost_doubled_or_changed_in_a_storm(fleet, tools) -> None:
    workers = [await fleet.start(max_failures=1000) for _ in range(WORKERS)]
    storm = Storm(fleet, tools, workers)
    raging = asyncio.ensure_future(storm.rage())

    ends: dict[str, tuple[str, object]] = {}

    async def end_of(job) -> tuple[str, object]:
        """State and result; timings are not part of either."""
        return (await job.status()).state, (await job.result(timeout_s=240)).choices

    async def subscriber(number: int) -> int:
        """Submits a share of the jobs, follows each to its end, and checks it."""
        resumed = 0
        async with AsyncClient(fleet.server.url, connect_timeout_s=240.0) as client:
            prompts = [f"job {i} of {number} " for i in range(JOBS // SUBSCRIBERS)]
            lengths = [100 + 17 * (i % 20) for i in range(len(prompts))]
            jobs = await client.submit_many(
                {
                    "model": "m",
                    "prompt": prompt,
                    "sampling": SamplingParams(max_tokens=length, n=1 + (length % 5 == 0)),
                    "priority": ("interactive", "default", "batch")[length % 3],
                }
                for prompt, length in zip(prompts, lengths)
            )
            for prompt, length, one in zip(prompts, lengths, await fleet.follow(*jobs)):
                assert one.text == tools.repeated(prompt, length)
                if length % 5 == 0:
                    assert one.text_of(1) == tools.repeated(prompt[1:] + prompt[0], length)
                resumed += one.resumed
            seen = {job.id: await end_of(job) for job in jobs}
        assert [state for state, _ in seen.values()] == ["finished"] * len(jobs)
        ends.update(seen)
        return resumed

    resumed = rounds = 0
    try:
        while not resumed or sum(storm.struck.values()) < LEAST:  # where it has yet to strike
            resumed += sum(await asyncio.gather(*map(subscriber, range(SUBSCRIBERS))))
            rounds += 1
    finally:
        storm.over = True
        await raging  # what it began it ends: a server that was stopped is started again
        await storm.calm()
    changed = [id for id, end in ends.items() if await end_of(fleet.client.job(id)) != end]
    print(
        f"{len(ends)} jobs, 0 lost, 0 doubled, 0 gaps, {len(changed)} changed terminal states; "
        f"struck: {dict(storm.struck)}; {resumed} attempts went on at an offset above zero"
    )
    assert changed == []
    assert len(ends) == rounds * (JOBS // SUBSCRIBERS * SUBSCRIBERS)
    assert not LONG or len(storm.struck) == 6
    assert await fleet.pending() == 0
