"""When an engine counts as hung: it is silent, and has had time to speak."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenfleet.engine import EngineConfig
from tokenfleet.engine.request import EngineRequest
from tokenfleet.worker.engine_link import engine_host, faults
from tokenfleet.worker.engine_link.engine_host import EngineHost
from tokenfleet.worker.engine_link.engine_process import EngineHandle
from tokenfleet.worker.engine_link.engine_spawn import (
    TELL_WHERE,
    longest_wait,
    states_of,
    waits_of,
)

LIMIT_S = 0.02
BEGAN = 1000.0


class Watched:
    """An engine that has work and says nothing, under a clock of the test's own."""

    pid = None
    last_heard = 0.0

    def __init__(self) -> None:
        self.killed = asyncio.Event()
        self.asked = 0
        """How often it was to say where it is."""
        self.looks = 0
        self._passes_s: list[float] = []
        self._now = BEGAN

    async def kill(self) -> int:
        self.killed.set()
        return -9

    def tell_where(self) -> None:
        assert not self.killed.is_set()
        self.asked += 1

    def clock(self) -> float:
        """Each look at it, two of which come with each tick, takes what the test says, or none."""
        self.looks += 1
        self._now += self._passes_s.pop(0) if self._passes_s else 0.0
        return self._now

    def passes(self, *seconds: float) -> None:
        """Time from here on: asleep, at work, asleep, ..."""
        self._passes_s = [0.0, *(part for one in seconds for part in (one, 0.0))]

    async def looked_at(self, times: int) -> None:
        until = self.looks + 2 * times
        while self.looks < until and not self.killed.is_set():  # noqa: ASYNC110  # it is no event
            await asyncio.sleep(0)


@asynccontextmanager
async def watched(passes: Callable[[], list[float]]) -> AsyncIterator[Watched]:
    engine: Any = Watched()
    engine.passes(*passes())
    dispatcher: Any = SimpleNamespace(launcher=SimpleNamespace(working_since=BEGAN))
    nobody: Any = None
    host = EngineHost(
        nobody, dispatcher, nobody, nobody, step_limit_s=LIMIT_S, start_limit_s=1.0,
        on_ready=nobody, clock=engine.clock,
    )  # fmt: skip
    watching = asyncio.create_task(host._watch(engine))
    watching.add_done_callback(lambda _: engine.killed.set())  # nobody waits for a broken watch
    yield engine
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


async def test_an_engine_that_is_silent_for_the_limit_is_killed():
    async with watched(lambda: [LIMIT_S / 4] * 5) as engine:
        await engine.killed.wait()
        assert engine.asked == 2  # half way, and before its end


async def test_a_silent_engine_is_asked_once_where_it_is_and_again_after_it_has_spoken():
    async with watched(lambda: [LIMIT_S / 4] * 4) as engine:
        await engine.looked_at(6)
        assert engine.asked == 1
        engine.passes(*[LIMIT_S / 4] * 4)
        engine.last_heard = engine.clock()
        await engine.looked_at(6)
        assert engine.asked == 2
        assert not engine.killed.is_set()


async def test_time_in_which_the_worker_itself_stood_still_is_no_silence_of_its_engine():
    async with watched(lambda: [100 * LIMIT_S, LIMIT_S / 4, 100 * LIMIT_S]) as engine:
        await engine.looked_at(6)
        assert not engine.killed.is_set()


async def test_an_engine_that_got_no_processor_is_not_hung_until_that_has_lasted_for_long(
    monkeypatch,
):
    waits = iter(range(1000))
    monkeypatch.setattr(engine_host, "waits_of", lambda _pid: {"1": float(next(waits))})
    async with watched(lambda: [LIMIT_S / 4] * 8) as engine:
        await engine.looked_at(10)
        assert not engine.killed.is_set()
    async with watched(lambda: [LIMIT_S / 4] * 20) as engine:
        await engine.killed.wait()


def test_a_thread_that_waits_for_a_processor_is_seen_and_one_that_sleeps_is_not():
    """Two that never rest share one processor."""
    one = str(min(os.sched_getaffinity(0)))
    busy = f"import os\nos.sched_setaffinity(0, {{{one}}})\nprint(flush=True)\nwhile True: pass"
    both = [
        subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for process in both:
            assert process.stdout is not None
            process.stdout.readline()
        first = waits_of(both[0].pid)
        if not first:
            pytest.skip("this kernel does not say how long threads wait (/proc/<pid>/schedstat)")
        while longest_wait(first, waits_of(both[0].pid)) < 0.01:
            pass
        both[0].send_signal(signal.SIGSTOP)
        os.waitpid(both[0].pid, os.WUNTRACED)
        stopped = waits_of(both[0].pid)
        assert longest_wait(stopped, waits_of(both[0].pid)) == 0
    finally:
        for process in both:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert waits_of(both[0].pid) == waits_of(None) == {}


@pytest.mark.parametrize("hangs_at", ["start", "step"])
async def test_an_engine_says_in_which_of_our_lines_each_of_its_threads_is(capfd, hangs_at):
    engine = EngineHandle(
        EngineConfig(model=Path("none")), {"simulated_step_s": 0.0, "fault": f"hang@{hangs_at}:1"}
    )
    starting = asyncio.create_task(engine.start())
    if hangs_at == "step":
        await starting
        engine.add(EngineRequest(id="a", prompt_token_ids=[1]))
        engine.flush()
    said = ""
    while "_suffer" not in said:  # it hangs as soon as it gets there
        await asyncio.sleep(0.01)
        if hangs_at == "step" or registered(engine.pid):
            engine.tell_where()
        said += capfd.readouterr().err
    assert f'File "{faults.__file__}", line' in said
    if hangs_at == "step":
        assert "in _step" in said
    states = states_of(engine.pid)
    assert all(state[0] in "SR" for state in states)
    starting.cancel()
    await engine.kill()
    assert states_of(engine.pid) == {}


def registered(pid: int | None) -> bool:
    """Whether a process handles the signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    assert caught is not None
    return bool(int(caught[1], 16) >> (TELL_WHERE - 1) & 1)


async def test_an_engine_that_dies_of_a_signal_says_where(capfd):
    engine = EngineHandle(EngineConfig(model=Path("none")), {"simulated_step_s": 0.0})
    await engine.start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSEGV)
    assert [batch async for batch in engine.batches()] == []
    assert await engine.cause_of_death() == "killed by SIGSEGV"
    assert "engine_child.py" in capfd.readouterr().err
