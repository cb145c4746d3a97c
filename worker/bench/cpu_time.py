"""CPU time of processes under test, as the kernel counts it: all threads, ended ones included.

Unlike a rate it hardly says how much else the machine had to do meanwhile; busy neighbours still
cost cache, and with it some of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

PREFIX = "cpu_s_per_1000_"
"""Of figures: seconds of CPU time per 1000 output tokens, by process."""
_WHOLE_PROCESS = 2
"""Of the kernel's clocks of another process, the exact one of all its threads."""


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed so far. Raises OSError when there is no such process."""
    return time.clock_gettime(~pid << 3 | _WHOLE_PROCESS)


class CpuTimes:
    """What processes compute from here on.

    Args:
        processes: ids by the names that the figures are to have.
    """

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = processes
        self._before = {name: cpu_s(pid) for name, pid in processes.items()}

    def figures(self, output_tokens: float) -> dict[str, float]:
        """Seconds per 1000 tokens until now."""
        return {
            PREFIX + name: (cpu_s(pid) - self._before[name]) / output_tokens * 1e3
            for name, pid in self._processes.items()
        }


def engine_of(worker_pid: int) -> int:
    """The engine process of a worker. Raises LookupError when it has none now."""
    children = Path(f"/proc/{worker_pid}/task/{worker_pid}/children").read_text().split()
    for child in map(int, children):
        if b"engine_child" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise LookupError(f"worker {worker_pid} has no engine process")
