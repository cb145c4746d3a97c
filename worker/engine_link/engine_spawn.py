"""The engine's operating-system process and our end of its socket, before any event loop is needed.

Launching costs milliseconds and imports little, so that a worker's start can begin with it: the
child loads its libraries and its model while the worker loads its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

POLL_S = 0.01
EXIT_PATIENCE_S = 2.0
TELL_WHERE = signal.SIGUSR1
"""Lets a child write where its threads are; one that has not come to its first line dies of it."""


class SpawnedEngine:
    """One child with a socket to it. It dies with this process and with its end of the socket.

    Launch it from the main thread: the kernel's parent-death signal follows threads.

    Args:
        init: the first bytes it is to read.
    """

    def __init__(self, init: bytes) -> None:
        self.socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tokenfleet.worker.engine_link.engine_child",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
            self.socket.sendall(init)
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell_where(self) -> None:
        """Let it write where each of its threads is."""
        self._process.send_signal(TELL_WHERE)

    async def exit_code(self, timeout_s: float) -> int | None:
        """Its exit code (negative: a signal) once it has ended; None when it has not in time."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if (code := self._process.poll()) is not None:
                return code
            await asyncio.sleep(POLL_S)
        return self._process.poll()

    async def end(self, *, leaving: bool) -> int:
        """Reap it, by force unless it is `leaving` by itself and does so soon; its exit code."""
        if leaving and (code := await self.exit_code(EXIT_PATIENCE_S)) is not None:
            return code
        self._process.kill()
        while (code := await self.exit_code(60.0)) is None:
            continue  # in a system call that cannot be interrupted: nobody can do more than wait
        return code


def waits_of(pid: int | None) -> dict[str, float]:
    """How long each thread of a process could have run and waited for a processor, in seconds;
    empty where the system does not tell."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            found[file.parent.name] = int(file.read_text().split()[1]) / 1e9
    return found


def states_of(pid: int | None) -> dict[str, int]:
    """What a process's threads are doing, as the system sees it, and how many do it: R runs or
    waits for a processor, S sleeps, D waits for a device, and in which function of the kernel."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            place = (task / "wchan").read_text()
            found[f"{state} {place}" if place not in ("", "0") else state] += 1
    return dict(found)


def longest_wait(before: dict[str, float], after: dict[str, float]) -> float:
    """Of the thread that waited longest between two such looks."""
    return max((waited - before.get(thread, waited) for thread, waited in after.items()), default=0)
