"""One worker: starts its parts' loops, watches them, and takes them down in order.

    intake --claim--> dispatcher --requests--> engine process
                          |      <--events----
                      publisher --emit, finish--> Redis
    beside them: lease keeper, reaper, heartbeat, control, health

Ends in one of three ways: drained on request (exit 0), never able to start (2: settings, model or
an id that another one has, 3: no Redis), or broken: without an engine that stays alive, or by a
fault of ours (1). In all of them every job that Redis can be told of is handed back first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

import structlog

from tokenfleet.engine.errors import CheckpointError, ConfigError, UnsupportedModel
from tokenfleet.engine.text import TextCodec
from tokenfleet.producer.errors import BrokerUnavailable, BrokerUnsupported
from tokenfleet.worker.broker import BROKER_ERRORS
from tokenfleet.worker.drain import Drain
from tokenfleet.worker.engine_link.engine_host import EngineLost
from tokenfleet.worker.engine_link.engine_process import EngineHandle, EngineInfo, new_engine
from tokenfleet.worker.health import HealthServer
from tokenfleet.worker.incarnation import WorkerIdTaken
from tokenfleet.worker.loops import fastest_loop, to_the_end
from tokenfleet.worker.observing.telemetry import Telemetry
from tokenfleet.worker.parts import Parts
from tokenfleet.worker.presence import StartFigures
from tokenfleet.worker.roster import Roster
from tokenfleet.worker.settings import WorkerSettings

EXIT_OK, EXIT_ENGINE, EXIT_BAD_INPUT, EXIT_BROKER = 0, 1, 2, 3
TELEMETRY_TIMEOUT_S = 2.0

log = structlog.get_logger()


class WorkerService:
    """A worker process. `run` returns its exit code.

    Args:
        settings: valid ones (settings.py: load_settings).
        telemetry: made from the settings when not given.
        started: monotonic time at which the process began, for the start-up figures.
        first_engine: one that was launched already (engine_link/engine_process.py: new_engine).
        make_engine: a handle for each new engine process; made from the settings when not given.
        loaded: called once this process has loaded what it needs, maybe in a thread.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        telemetry: Telemetry | None = None,
        started: float | None = None,
        first_engine: EngineHandle | None = None,
        make_engine: Callable[[], EngineHandle] | None = None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self._figures = StartFigures(started)
        self.settings = settings
        self._loaded = loaded
        self.worker_id = settings.worker_id or _new_worker_id()
        self.telemetry = telemetry or Telemetry.from_settings(settings, self.worker_id)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.parts = Parts(
            settings,
            self.telemetry,
            worker_id=self.worker_id,
            make_engine=make_engine or engines(settings, first_engine),
            drain=self.drain,
            draining=self._stop.is_set,
            on_ready=self._engine_ready,
            on_registered=self._registered,
        )

    @property
    def roster(self) -> Roster:
        """The jobs that are this worker's."""
        return self.parts.roster

    async def run(self) -> int:
        """Serve until drained or beyond help."""
        self._figures.mark("imports_s")
        self._listen_to_signals()
        self._start("engine", self.parts.host.run())  # first: loading the model takes longest
        try:
            code = await self._connect()
            if code == EXIT_OK:
                code = await self._serve()
        finally:
            await to_the_end(self._close())
        log.info("worker_stopped", exit_code=code)
        return code

    async def _connect(self) -> int:
        """Reach Redis and read the tokenizer; an exit code other than EXIT_OK when it cannot be."""
        try:
            codec, warnings = await asyncio.gather(self._load_codec(), self.parts.queue.ensure())
        except (BrokerUnavailable, BrokerUnsupported) as error:
            log.error("broker_not_usable", error=str(error))
            return EXIT_BROKER
        except CheckpointError as error:
            log.error("model_refused", error=str(error))
            return EXIT_BAD_INPUT
        for warning in warnings:
            log.warning("broker_setting", problem=warning)
        self._figures.mark("broker_s")
        self.parts.preparer.codec = codec
        self.parts.preparer.warm(self._loaded)
        return EXIT_OK

    def drain(self) -> None:
        """Take no more jobs and end; called again: hand back at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    # life

    async def _serve(self) -> int:
        try:
            health = await self._start_health()
        except OSError as error:
            log.error("health_not_served", port=self.settings.health_port, error=str(error))
            return EXIT_BAD_INPUT
        intake = self._start("intake", self._take_jobs())
        self._start_upkeep()
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((*self._tasks, stop), return_when=asyncio.FIRST_COMPLETED)
            code = _exit_code(self._tasks)
            self._stop.set()
            self.parts.intake.drain()
            await asyncio.wait((intake,))
            await Drain(self.roster, self.parts.dispatcher).run(
                grace_s=self.settings.grace_s if code == EXIT_OK else 0.0,
                patience_s=self.settings.lease_s,
                hurry=self._hurry,
            )
        finally:
            stop.cancel()
            if health is not None:
                await health.stop()
        return code

    def _start_upkeep(self) -> None:
        parts = self.parts
        self._start("publisher", parts.publisher.run())
        self._start("leases", parts.leases.run())
        self._start("reaper", parts.reaper.run())
        self._start("control", parts.control.run())
        self._start("presence", parts.presence.run())
        if self.settings.health_port is not None or self.settings.otlp_endpoint:
            self._start("queue watch", parts.watch.run())

    async def _take_jobs(self) -> None:
        """Once it is known that nobody else does so under our id."""
        known = (self.parts.presence.named, self._stop)
        first = [asyncio.ensure_future(one.wait()) for one in known]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        for one in first:
            one.cancel()
        await self.parts.intake.run()

    async def _close(self) -> None:
        """Stop what still runs, leave the worker table, give telemetry a last chance; each of them
        also where one before it fails."""
        async with AsyncExitStack() as last_first:
            last_first.push_async_callback(
                asyncio.to_thread, self.telemetry.shutdown, TELEMETRY_TIMEOUT_S
            )
            last_first.push_async_callback(self.parts.connection.aclose)
            last_first.push_async_callback(self.parts.queue.aclose)
            last_first.push_async_callback(self._leave)
            last_first.push_async_callback(self.parts.dispatcher.close)
            last_first.push_async_callback(_end_all, self._tasks)
            await self.parts.host.stop()

    async def _leave(self) -> None:
        if self.parts.presence.registered:
            with suppress(*BROKER_ERRORS):
                async with asyncio.timeout(TELEMETRY_TIMEOUT_S):
                    await self.parts.queue.leave()

    # loops and start-up of its own

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        return task

    async def _load_codec(self) -> TextCodec:
        codec = await asyncio.to_thread(TextCodec.load, self.settings.model)
        self._figures.mark("tokenizer_s")
        return codec

    async def _start_health(self) -> HealthServer | None:
        port = self.settings.health_port
        if port is None:
            return None
        server = HealthServer(
            self.settings.health_host,
            port,
            reasons=self.not_ready,
            metrics=self.telemetry.render_metrics,
        )
        bound = await server.start()
        log.info("health_served", host=self.settings.health_host, port=bound)
        return server

    def not_ready(self) -> list[str]:
        """Why this worker would not take a job now; empty when it would."""
        return self.parts.not_ready()

    def _engine_ready(self, info: EngineInfo) -> None:
        self._figures.note(engine_imports_s=info.imports_s, model_s=info.model_s)
        log.info(
            "engine_ready",
            pid=self.parts.host.pid,
            slots=info.slots,
            max_model_len=info.max_model_len,
        )
        self._say_ready()

    def _registered(self) -> None:
        self._figures.mark("registered_s")
        self._say_ready()

    def _say_ready(self) -> None:
        if self.parts.presence.registered and self.parts.host.ready:
            self._figures.say(self.settings.served_name)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
                loop.add_signal_handler(number, self.drain)


def engines(
    settings: WorkerSettings, first: EngineHandle | None = None
) -> Callable[[], EngineHandle]:
    """Handles for one engine process after the other, `first` before all."""
    ready = [first] if first is not None else []
    return lambda: ready.pop() if ready else new_engine(settings)


def run_worker(service: WorkerService) -> int:
    """Run a worker; returns its exit code."""
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        return runner.run(service.run())


async def _end_all(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended; a client library may take one cancel for its own."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.2)
    await asyncio.gather(*tasks, return_exceptions=True)


def _exit_code(tasks: list[asyncio.Task[None]]) -> int:
    """What a loop that has ended says about the worker; EXIT_OK when it is only to stop."""
    for task in tasks:
        if not task.done() or task.cancelled() or (error := task.exception()) is None:
            continue
        if isinstance(error, ConfigError | UnsupportedModel | CheckpointError):
            log.error("model_refused", error=str(error), kind=type(error).__name__)
            return EXIT_BAD_INPUT
        if isinstance(error, WorkerIdTaken):
            log.error("worker_id_taken", error=str(error))
            return EXIT_BAD_INPUT
        if isinstance(error, EngineLost):
            log.error("engine_lost", error=str(error))
            return EXIT_ENGINE
        log.error("loop_broke", loop=task.get_name(), exc_info=error)
        return EXIT_ENGINE
    return EXIT_OK


def _new_worker_id() -> str:
    host = "".join(c if c.isalnum() or c in "-_." else "-" for c in socket.gethostname())[:32]
    return f"{host}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
