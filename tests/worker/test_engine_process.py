"""The engine process, driven through its handle, with an engine that needs no model."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import CheckpointError, ConfigError, UnsupportedModel
from tokenfleet.engine.request import CoreEvent, EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.worker.engine_link import engine_child, frames
from tokenfleet.worker.engine_link.engine_process import EngineHandle, EngineStartFailed
from tokenfleet.worker.engine_link.faults import Faults
from tokenfleet.worker.engine_link.outbox import Outbox
from tokenfleet.worker.engine_link.simulated import SimulatedCore
from tokenfleet.worker.engine_link.step_log import StepLog

CONFIG = EngineConfig(model=Path("none"), max_num_seqs=4)
FAST = {"simulated_step_s": 0.0}
PROMPT = [5, 6, 7]


def request(id: str = "a", prompt: list[int] | None = None, **params: object) -> EngineRequest:
    prompt = PROMPT if prompt is None else prompt
    return EngineRequest(id=id, prompt_token_ids=prompt, params=SamplingParams(**params))


async def collect(engine: EngineHandle, ends: int) -> list[CoreEvent]:
    """Events until `ends` choices have finished."""
    events: list[CoreEvent] = []
    async for batch in engine.batches():
        events += batch.events
        if sum(e.finish_reason is not None for e in events) == ends:
            break
    return events


def tokens(events: list[CoreEvent], id: str) -> list[int]:
    return [token for event in events if event.id == id for token in event.token_ids]


def alive(pid: int) -> bool:
    """Whether a process with this id runs; a zombie that somebody will reap does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def test_tokens_of_several_requests_arrive_once_and_in_order() -> None:
    engine = EngineHandle(CONFIG, FAST)
    info = await engine.start()
    assert info.slots == 4
    for index in range(6):
        engine.add(request(str(index), max_tokens=50 + index))
    events = await collect(engine, ends=6)
    for index in range(6):
        assert tokens(events, str(index)) == [PROMPT[i % 3] for i in range(50 + index)]
    await engine.stop()


async def test_an_idle_engine_waits_and_then_works_again() -> None:
    engine = EngineHandle(CONFIG, FAST)
    await engine.start()
    for id in ("first", "second"):
        engine.add(request(id, max_tokens=3))
        assert tokens(await collect(engine, ends=1), id) == PROMPT
    await engine.stop()


async def test_a_resumed_request_goes_on_behind_its_tokens() -> None:
    engine = EngineHandle(CONFIG, FAST)
    await engine.start()
    engine.add(
        EngineRequest("a", PROMPT, SamplingParams(max_tokens=5), resume=((5, 6),)),
    )
    assert tokens(await collect(engine, ends=1), "a") == [7, 5, 6]
    await engine.stop()


async def test_a_refused_request_is_answered_and_the_others_go_on() -> None:
    engine = EngineHandle(CONFIG, FAST)
    await engine.start()
    engine.add(request("bad", prompt=[]))
    engine.add(request("good", max_tokens=3))
    refusals, events = [], []
    async for batch in engine.batches():
        refusals += batch.refusals
        events += batch.events
        if tokens(events, "good") == PROMPT:
            break
    assert [(r.id, r.code) for r in refusals] == [("bad", "empty_prompt")]
    await engine.stop()


async def test_an_aborted_choice_ends_alone() -> None:
    engine = EngineHandle(CONFIG, {"simulated_step_s": 0.001})
    await engine.start()
    engine.add(request("a", n=2, max_tokens=500))
    engine.abort("a", 0)
    events = await collect(engine, ends=2)
    reasons = {e.choice: e.finish_reason for e in events if e.finish_reason}
    assert reasons == {0: "cancelled", 1: "length"}
    await engine.stop()


@pytest.mark.parametrize("error", [ConfigError, UnsupportedModel, CheckpointError])
async def test_a_start_error_reaches_the_parent_with_its_type(error: type[Exception]) -> None:
    engine = EngineHandle(CONFIG, FAST | {"fault": f"raise@start:{error.__name__}"})
    with pytest.raises(error, match="injected"):
        await engine.start()


async def test_a_child_that_dies_at_start_is_a_typed_error() -> None:
    engine = EngineHandle(CONFIG, FAST | {"fault": "kill@start:1"})
    with pytest.raises(EngineStartFailed, match="SIGKILL"):
        await engine.start()


async def test_a_killed_child_ends_the_batches_and_says_why() -> None:
    engine = EngineHandle(CONFIG, FAST | {"fault": "kill@sent:3"})
    await engine.start()
    engine.add(request(max_tokens=100))
    events = [event async for batch in engine.batches() for event in batch.events]
    assert tokens(events, "a") == PROMPT
    assert await engine.cause_of_death() == "killed by SIGKILL"


async def test_a_step_that_raises_ends_the_child_with_the_reason() -> None:
    engine = EngineHandle(CONFIG, FAST | {"fault": "raise@step:2"})
    await engine.start()
    engine.add(request(max_tokens=100))
    events = [event async for batch in engine.batches() for event in batch.events]
    assert tokens(events, "a") == PROMPT[:1]
    assert "injected at step:2" in await engine.cause_of_death()


async def test_a_stopped_child_is_killed_all_the_same() -> None:
    engine = EngineHandle(CONFIG, FAST)
    await engine.start()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    assert await engine.kill() == -signal.SIGKILL


PARENT = """
import asyncio
from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.worker.engine_link.engine_process import EngineHandle

async def main():
    engine = EngineHandle(EngineConfig(model="none"), {"simulated_step_s": 0.01})
    await engine.start()
    engine.add(EngineRequest("a", [1], SamplingParams(max_tokens=5000)))
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_worker_leaves_no_engine_behind() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    while True:
        if not alive(child):
            break
        await asyncio.sleep(0.01)


async def test_terminal_signals_leave_the_engine_to_its_worker() -> None:
    engine = EngineHandle(CONFIG, {"simulated_step_s": 0.001})
    await engine.start()
    engine.add(request(max_tokens=20))
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGINT)
    os.kill(engine.pid, signal.SIGTERM)
    assert len(tokens(await collect(engine, ends=1), "a")) == 20
    await engine.stop()


def test_an_engine_at_rest_prepares_once_for_the_first_grammar(monkeypatch) -> None:
    monkeypatch.setattr(engine_child, "AT_REST_S", 0.01)
    prepared: queue.Queue[bool] = queue.Queue()

    class Core(SimulatedCore):
        def prepare_grammars(self) -> None:
            prepared.put(self.has_work)

    core = Core(CONFIG, 0.0)
    core.add(request(max_tokens=3))
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    parts = (engine_child.Inbox(theirs), Outbox(theirs), Faults(None), StepLog(None))
    loop = threading.Thread(target=engine_child.EngineLoop(core, *parts).run, args=(theirs,))
    loop.start()
    assert prepared.get(timeout=60) is False
    ours.sendall(frames.encode(frames.ADD, frames.pack_request(request("b", max_tokens=2))))
    while core.stats.step < 5:
        ours.recv(1 << 16)
    ours.sendall(frames.encode(frames.STOP))
    loop.join(60)
    assert not loop.is_alive()
    assert prepared.empty()
    ours.close()
    theirs.close()
