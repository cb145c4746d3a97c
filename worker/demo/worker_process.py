"""A `tokenfleet worker` as a child process, for the demo and the fleet bench.

It never outlives its parent: the kernel kills it when the parent dies, and `stop` ends its whole
process group. Ctrl-C reaches the parent only, which decides.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tokenfleet.producer.embedded import hold_port

PR_SET_PDEATHSIG = 1
POLL_S = 0.05
PAGE_TIMEOUT_S = 60.0


class WorkerDied(RuntimeError):
    """A worker ended that should be running; the message ends with its last log lines."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class WorkerProcess:
    """One worker.

    Start it from the main thread: the kernel's parent-death signal follows threads.
    """

    name: str
    """Its worker_id."""
    settings: Mapping[str, object]
    """Flags by setting name; True and False for switches."""
    log: Path
    """Where its standard error goes."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Changes to our environment; None removes a variable."""
    health_port: int = field(init=False)
    """Nobody else's while this lives."""
    _process: asyncio.subprocess.Process | None = None

    def __post_init__(self) -> None:
        self.health_port = hold_port(self)

    @property
    def pid(self) -> int:
        """Raises WorkerDied when it was never started."""
        if self._process is None:
            raise WorkerDied(f"{self.name} was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tokenfleet.worker.commands.cli",
                "worker",
                *flags_of(
                    {
                        **self.settings,
                        "worker_id": self.name,
                        "health_port": self.health_port,
                    }
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )

    async def ready(self) -> None:
        """Wait until it takes jobs. Raises WorkerDied when it ends before."""
        while not await _is_ready(self.health_port):
            if not self.alive:
                raise WorkerDied(f"{self.name} ended at its start:\n{self.last_lines()}")
            await asyncio.sleep(POLL_S)

    async def metric(self, name: str) -> float:
        """A figure of /metrics, summed over its labels; 0 while there is none."""
        _, page = await _get(self.health_port, "/metrics")
        lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def ended(self) -> int:
        """Wait for its end, for whatever reason; the exit code."""
        if self._process is None:
            raise WorkerDied(f"{self.name} was not started")
        return await self._process.wait()

    async def kill(self) -> None:
        """SIGKILL to the worker process alone; its engine process follows by itself."""
        if self._process is not None and self.alive:
            self._process.kill()
            await self._process.wait()

    async def stop(self, patience_s: float = 10.0) -> int | None:
        """SIGTERM, then SIGKILL to what is left of its group.

        The exit code, None if never started.
        """
        process = self._process
        if process is None:
            return None
        if self.alive:
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return await process.wait()

    def last_lines(self, count: int = 15) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-count:])

    def _environment(self) -> dict[str, str]:
        """Ours, but no settings of the person who started us: this worker has its own."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")}
        changed = {**ours, **self.environment}
        return {name: value for name, value in changed.items() if value is not None}


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Settings as the worker's command line spells them; None is left out."""
    flags: list[str] = []
    for name, value in settings.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{word}" if value else f"--no-{word}")
        elif value is not None:
            flags += [f"--{word}", str(value)]
    return flags


async def _get(port: int, path: str) -> tuple[int, str]:
    """Status and body of a page on this machine; raises OSError and TimeoutError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        answer = await asyncio.wait_for(reader.read(), PAGE_TIMEOUT_S)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    head, _, body = answer.decode().partition("\r\n\r\n")
    words = head.split(" ", 2)
    return (int(words[1]) if len(words) > 1 else 0), body


async def _is_ready(port: int) -> bool:
    try:
        status, _ = await _get(port, "/readyz")
    except (OSError, TimeoutError):
        return False
    return status == 200
