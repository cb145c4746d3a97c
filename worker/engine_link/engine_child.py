"""The engine process: `python -m tokenfleet.worker.engine_link.engine_child <fd> <pid>`.

A synchronous loop over one core: take the frames that are there, step, send what the step made.
It waits only when there is nothing to compute, and it never outlives its parent: the kernel kills
it when the parent dies, and a closed socket ends it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import fields
from typing import Any, Protocol

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import EngineError, InvalidRequest
from tokenfleet.engine.request import CoreEvent, EngineRequest
from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.engine_link import frames
from tokenfleet.worker.engine_link.engine_spawn import TELL_WHERE
from tokenfleet.worker.engine_link.faults import Faults
from tokenfleet.worker.engine_link.outbox import Outbox
from tokenfleet.worker.engine_link.step_log import StepLog

READ_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
LAST_WORDS_S = 5.0
AUDIT_EVERY_S = 10.0
AT_REST_S = 1.0
"""After so long without work, once, what the first grammar needs is built."""


class Core(Protocol):
    """What the loop needs of an engine core."""

    @property
    def has_work(self) -> bool: ...
    @property
    def free_slots(self) -> int: ...
    @property
    def stats(self) -> StepStats: ...
    @property
    def max_len(self) -> int: ...
    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str, choice: int | None = None) -> None: ...
    def step(self) -> list[CoreEvent]: ...
    def audit(self) -> None: ...
    def prepare_grammars(self) -> None: ...


class Inbox:
    """Frames from the worker, off a non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = frames.FrameBuffer()
        self.closed = False

    def take(self) -> list[frames.Frame]:
        """Every complete frame that has arrived; `closed` once the worker is gone."""
        taken: list[frames.Frame] = []
        while not self.closed:
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.closed = not data
            taken += self._buffer.feed(data)
        return taken


class EngineLoop:
    """Drives one core between its two ends of the socket."""

    def __init__(
        self, core: Core, inbox: Inbox, outbox: Outbox, faults: Faults, step_log: StepLog
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._faults = faults
        self._step_log = step_log
        self._stopped = False
        self._prepared = False
        self._audit_at = 0.0

    def run(self, sock: socket.socket) -> None:
        """Step until told to stop or left alone."""
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while True:
                if not self._core.has_work:
                    self._step_log.idle()
                    self._audit()
                    self._wait(selector, sock)
                for frame in self._inbox.take():
                    self._apply(frame)
                if self._stopped or self._inbox.closed:
                    return
                if self._core.has_work:
                    self._step()
                else:
                    self._outbox.flush()

    def _audit(self) -> None:
        """Look for broken invariants while nobody waits, now and then; one ends this process."""
        now = time.monotonic()
        if now >= self._audit_at:
            self._audit_at = now + AUDIT_EVERY_S
            self._core.audit()

    def _wait(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        """Sleep until the worker sends something, or takes what it has not taken yet; or, the first
        time, until there is leisure for what may be wanted later."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox.pending else 0)
        selector.modify(sock, wanted)
        if not selector.select(None if self._prepared else AT_REST_S):
            self._prepared = True
            self._core.prepare_grammars()

    def _step(self) -> None:
        self._faults.visit("step")
        self._step_log.begin()
        events: list[CoreEvent] = self._core.step()
        self._step_log.made(events)
        self._outbox.put(events, self._core.stats, self._core.free_slots)
        self._faults.visit("sent")

    def _apply(self, frame: frames.Frame) -> None:
        kind = frame[0]
        if kind == frames.ADD:
            self._add(frame[1])
        elif kind == frames.ABORT:
            self._core.abort(frame[1], frame[2])
        elif kind == frames.STOP:
            self._stopped = True

    def _add(self, plain: list[Any]) -> None:
        if self._faults:
            self._faults.visit("add", ",".join(f"{token:x}" for token in plain[1]))
        try:
            self._core.add(frames.unpack_request(plain))
        except InvalidRequest as refusal:
            self._outbox.put_frame(frames.REFUSED, plain[0], refusal.code, str(refusal))


def main(fd: int, parent_pid: int) -> int:
    """Serve one worker over the inherited socket `fd`; returns the exit code."""
    started = time.monotonic()
    tell_where()
    _follow_parent(parent_pid)
    sock = socket.socket(fileno=fd)
    first = _read_first(sock)
    if first is None:
        return 0
    config, options = first[1], first[2]
    sock.setblocking(False)
    inbox, outbox = Inbox(sock), Outbox(sock)
    try:
        faults = Faults(options.get("fault"))
        faults.visit("start")
        core, figures = _make_core(config, options, started)
    except EngineError as error:
        return _last_words(outbox, frames.BROKEN, type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001 - reported to the worker, which decides
        traceback.print_exc()
        return _last_words(outbox, frames.BROKEN, "EngineStartFailed", _in_words(error))
    gc.freeze()  # what is loaded stays: a collection that visits it takes 0.15 s, between two steps
    outbox.put_frame(frames.READY, figures)
    try:
        step_log = StepLog(options.get("step_log"))
        EngineLoop(core, inbox, outbox, faults, step_log).run(sock)
    except ConnectionError:
        return 0
    except Exception as error:  # noqa: BLE001 - the same
        traceback.print_exc()
        return _last_words(outbox, frames.CRASHED, _in_words(error))
    return 0


def _make_core(
    config: dict[str, Any], options: dict[str, Any], started: float
) -> tuple[Core, dict[str, Any]]:
    known = {f.name for f in fields(EngineConfig)}
    engine_config = EngineConfig(**{k: v for k, v in config.items() if k in known})
    core: Core
    before = time.monotonic()
    if options.get("simulated_step_s") is not None:
        from tokenfleet.worker.engine_link.simulated import SimulatedCore

        core = SimulatedCore(engine_config, options["simulated_step_s"])
    else:
        from tokenfleet.engine.core import EngineCore
        from tokenfleet.engine.text import TextCodec

        before = time.monotonic()
        codec = TextCodec.load(engine_config.model)
        core = EngineCore(engine_config, known_tokens=codec.known_tokens, compiler=codec.compiler())
    loaded = time.monotonic()
    return core, {
        "slots": engine_config.max_num_seqs,
        "max_model_len": core.max_len,
        "imports_s": before - started,
        "model_s": loaded - before,
    }


def tell_where() -> None:
    """Write where every thread is to the error output, on the signal that asks for it and on one
    that ends this process. Code of other languages that does not return holds neither up."""
    faulthandler.enable()
    faulthandler.register(TELL_WHERE, all_threads=True)


def _follow_parent(parent_pid: int) -> None:
    """Die with the parent, and leave signals of the terminal and the supervisor to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)  # it died before the line above


def _read_first(sock: socket.socket) -> frames.Frame | None:
    """The init frame; None when the worker is gone already."""
    buffer = frames.FrameBuffer()
    while data := sock.recv(READ_BYTES):
        for frame in buffer.feed(data):
            return frame
    return None


def _last_words(outbox: Outbox, kind: str, *words: str) -> int:
    """Say why this process ends, waiting for the worker to read it; returns the exit code."""
    outbox.put_frame(kind, *words)
    outbox.close(timeout_s=LAST_WORDS_S)
    return 1


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
