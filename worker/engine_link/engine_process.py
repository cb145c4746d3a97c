"""The worker's side of the engine process: start it, feed it, hear from it, notice its death.

A handle belongs to one child for life; when the child is gone, every event it sent has been
delivered before `batches` ends, and a new handle takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import CheckpointError, ConfigError, EngineError, UnsupportedModel
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.engine_link import frames
from tokenfleet.worker.engine_link.engine_spawn import SpawnedEngine
from tokenfleet.worker.engine_link.hearing import Hearing
from tokenfleet.worker.settings import WorkerSettings, engine_config, engine_options


class EngineStartFailed(EngineError):
    """The engine process ended before it was ready, for a reason that is not the user's."""


_START_ERRORS: dict[str, type[EngineError]] = {
    e.__name__: e for e in (CheckpointError, ConfigError, UnsupportedModel)
}


class StepEvent(NamedTuple):
    """A CoreEvent as it comes out of a frame; made thousands of times a second."""

    id: str
    choice: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    error: str | None = None
    error_code: str | None = None


class Refusal(NamedTuple):
    """The engine will not run this request; all others go on."""

    id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine says about itself."""

    slots: int
    max_model_len: int
    imports_s: float
    model_s: float


@dataclass(slots=True)
class Batch:
    """Everything the engine said since the last one, oldest first."""

    events: list[StepEvent]
    refusals: list[Refusal]
    stats: StepStats | None
    """Of the last step among them."""
    preempted: list[str]
    """Requests that lost their blocks in any of them."""


class EngineHandle:
    """One engine process.

    Args:
        config: what its core is started with.
        options: `simulated_step_s` and `fault`, both for tests.
    """

    def __init__(self, config: EngineConfig, options: dict[str, Any] | None = None) -> None:
        self._config = config
        self._options = options or {}
        self._child: SpawnedEngine | None = None
        self._hearing: Hearing | None = None
        self._unsent: list[bytes] = []
        self._crash: str | None = None
        self._listens = False
        self.last_heard = time.monotonic()
        """When the child last said anything; only it moves this."""
        self.stepped = False
        """Whether the child has finished a step."""

    @property
    def pid(self) -> int | None:
        """The child's process id, once launched."""
        return self._child.pid if self._child else None

    def launch(self) -> None:
        """Start the child without waiting for it; `start` goes on from here."""
        init = frames.encode(frames.INIT, _plain_config(self._config), self._options)
        self._child = SpawnedEngine(init)

    async def start(self) -> EngineInfo:
        """Launch the child, unless that is done, and wait until its model is loaded.

        Raises:
            ConfigError, UnsupportedModel, CheckpointError: the child's, with its message.
            EngineStartFailed: it died without one.
        """
        if self._child is None:
            self.launch()
        assert self._child is not None
        _, self._hearing = await asyncio.get_running_loop().create_connection(
            Hearing, sock=self._child.socket
        )
        try:
            return await self._ready()
        except BaseException:
            await self.kill()
            raise

    def add(self, request: EngineRequest) -> None:
        """Send a request; what is wrong with it comes back as a Refusal."""
        self._send(frames.ADD, frames.pack_request(request))

    def abort(self, id: str, choice: int | None = None) -> None:
        """Stop a request or one of its choices; unknown ids are ignored over there."""
        self._send(frames.ABORT, id, choice)

    def tell_where(self) -> None:
        """Let the child write to its error output where each of its threads is."""
        if self._child is not None:
            self._child.tell_where()

    async def batches(self) -> AsyncIterator[Batch]:
        """What the engine says, until it is gone; see `cause_of_death` then."""
        assert self._hearing is not None
        while found := await self._hearing.take():
            self.last_heard = time.monotonic()
            yield self._as_batch(found)

    async def cause_of_death(self) -> str:
        """Why the child is gone, once `batches` has ended."""
        code = await self.kill()
        if self._crash:
            return self._crash
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End the child: politely where it listens, and in any case."""
        if self._child is not None and self._listens:
            self._send(frames.STOP)
            await self._child.exit_code(timeout_s)
        await self.kill()

    async def kill(self) -> int:
        """End the child now and reap it; returns its exit code (negative: a signal).

        A child that has closed its end is given a moment: its own exit code says more.
        """
        if self._child is None:
            return 0
        hearing = self._hearing
        leaving = self._crash is not None or (hearing is not None and hearing.ended)
        code = await self._child.end(leaving=leaving)
        if hearing is None:
            self._child.socket.close()
            return code
        hearing.transport.close()
        await asyncio.shield(hearing.closed)
        return code

    async def _ready(self) -> EngineInfo:
        assert self._hearing is not None
        for frame in await self._hearing.take():
            if frame[0] == frames.READY:
                self._listens = True
                self.last_heard = time.monotonic()
                return EngineInfo(**frame[1])
            if frame[0] == frames.BROKEN:
                raise _START_ERRORS.get(frame[1], EngineStartFailed)(frame[2])
        code = await self.kill()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise EngineStartFailed(f"the engine process ended before it was ready: {how}")

    def _as_batch(self, found: list[frames.Frame]) -> Batch:
        batch = Batch([], [], None, [])
        for frame in found:
            kind = frame[0]
            if kind == frames.STEP:
                self.stepped = True
                batch.events += map(StepEvent._make, frame[1])
                batch.stats = frames.unpack_stats(frame[2])
                batch.preempted += batch.stats.preempted_ids
            elif kind == frames.REFUSED:
                batch.refusals.append(Refusal(*frame[1:]))
            elif kind == frames.CRASHED:
                self._crash = frame[1]
        return batch

    def _send(self, kind: str, *fields: Any) -> None:
        """Frames of one turn of the loop leave together: the child acts on all of them before its
        next step, and not on the first one alone."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append(frames.encode(kind, *fields))

    def flush(self) -> None:
        """Let what waits leave now, past a loop that sends at the end of its turn."""
        unsent, self._unsent = b"".join(self._unsent), []
        if not unsent or self._hearing is None or self._hearing.transport.is_closing():
            return
        assert self._child is not None
        transport = self._hearing.transport
        if transport.get_write_buffer_size() == 0:
            with contextlib.suppress(OSError):  # the transport finds out, and says so
                unsent = unsent[self._child.socket.send(unsent) :]
        if unsent:
            transport.write(unsent)


def new_engine(settings: WorkerSettings) -> EngineHandle:
    """The engine that the settings ask for, not launched yet."""
    return EngineHandle(engine_config(settings), engine_options(settings))


def _plain_config(config: EngineConfig) -> dict[str, Any]:
    plain = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return plain | {"model": str(config.model)}
