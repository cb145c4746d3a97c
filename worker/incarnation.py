"""Which process a worker id belongs to, so that no two that run share one.

Two workers of one name would look like one in Redis: each would give back the other's jobs as its
own lost ones, and leave the table for both. So a worker's line says which process wrote it, and
nobody writes over the line of another one that may be alive.

Invariant: an id is taken over from a process that has ended, or that has let its line run out.
"""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tokenfleet.producer.errors import TokenfleetError


class WorkerIdTaken(TokenfleetError):
    """Another worker is there under this id."""

    def __init__(self, worker_id: str, holder: Incarnation, seen_ms: int) -> None:
        super().__init__(
            f"worker_id {worker_id} is that of another worker, process {holder.pid} on "
            f"{holder.host}; give each worker its own, or leave worker_id out"
        )
        self.worker_id = worker_id
        self.holder = holder
        self.seen_ms = seen_ms
        """When it last wrote its line, by the server's clock."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One run of a worker."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    pids: str = field(default_factory=lambda: _pids())
    """Names the table in which `pid` means something: containers have their own."""

    def as_line(self) -> dict[str, str | int]:
        """In the worker table."""
        return {"incarnation": self.key, "host": self.host, "pid": self.pid, "pids": self.pids}

    def knows_ended(self, other: Incarnation) -> bool:
        """Whether that one's process is one that we could see, and is gone."""
        if not self.pids or (self.host, self.pids) != (other.host, other.pids) or other.pid <= 0:
            return False
        try:
            os.kill(other.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


def _pids() -> str:
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""
