"""What there is to see of a fleet, and how it is read from what Redis holds.

Invariant: nothing here reaches Redis, and of a text that anybody may have written only what
can be printed is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """One class of one model, over all partitions."""

    model: str
    priority: str
    waiting: int = 0
    """Not claimed yet, those handed back included."""
    running: int = 0
    """Under a worker's lease."""
    oldest_s: float | None = None
    """How long the next job has waited; None when none waits."""
    front: int = 0
    """How many of the waiting were handed back, and go before the others."""
    paused: bool = False
    """Nobody claims from it until it is resumed."""


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker, as it last said of itself."""

    worker: str
    model: str
    host: str
    state: str
    """ready, starting, draining, or whatever its engine is."""
    slots: int
    running: int
    """Jobs in its engine."""
    owned: int
    """Jobs under its lease, those it has ready included."""
    tokens_per_s: float | None
    """Output tokens between its last two heartbeats; None: it does not say."""
    kv_usage: float | None
    """Share of its KV blocks in use."""
    seen_s: float
    """How long ago."""

    @property
    def slots_used(self) -> str:
        """As in `64/64 +2`: slots taken of all, and jobs that wait in the engine for the next."""
        return _used(min(self.running, self.slots), self.slots, self.running)


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job under a lease. What it says is not in here."""

    job_id: str
    model: str
    priority: str
    worker: str
    attempt: int
    offset: int
    """Output tokens logged."""
    age_s: float
    """Since it was submitted."""


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """One look at everything."""

    at_ms: int
    """The server's clock."""
    workers: tuple[WorkerLine, ...]
    queues: tuple[QueueDepth, ...]
    delayed: int
    """Jobs that may not be claimed yet: a delay, or the pause before their next try."""
    dead: int
    """Dead letters."""

    @property
    def tokens_per_s(self) -> float:
        """Of all workers that say."""
        return sum(worker.tokens_per_s or 0.0 for worker in self.workers)

    @property
    def waiting(self) -> int:
        """Jobs in all queues."""
        return sum(queue.waiting for queue in self.queues)

    @property
    def running(self) -> int:
        """Jobs that workers have claimed, in all queues."""
        return sum(queue.running for queue in self.queues)

    @property
    def slots(self) -> int:
        """Of all workers."""
        return sum(worker.slots for worker in self.workers)

    @property
    def slots_used(self) -> str:
        """Of all workers, as in WorkerLine."""
        taken = sum(min(worker.running, worker.slots) for worker in self.workers)
        return _used(taken, self.slots, sum(worker.running for worker in self.workers))

    def trouble_of(self, queue: QueueDepth) -> str:
        """Why nobody takes the queue's jobs: `paused`, `no worker`, or nothing."""
        if queue.paused:
            return "paused"
        served = any(worker.model == queue.model for worker in self.workers)
        return "no worker" if queue.waiting and not served else ""


def _used(taken: int, slots: int, running: int) -> str:
    return f"{taken}/{slots} +{running - taken}" if running > taken else f"{taken}/{slots}"


def duration(seconds: float) -> str:
    """4.2 s, 1 min 15 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def partition_in(key: str) -> int:
    """p of `{namespace:p}:...`."""
    return int(key[key.index(":") + 1 : key.index("}")])


def class_in(key: str) -> tuple[str, str]:
    """Model and priority in `{namespace:p}:q:<model>:<priority>[:front]`.

    A model may hold colons.
    """
    model, _, priority = key.split("}:q:", 1)[1].removesuffix(":front").rpartition(":")
    return model, priority


def sum_of(one: QueueDepth, other: QueueDepth) -> QueueDepth:
    """Two partitions of one queue as one; the older of the oldest jobs."""
    ages = [age for age in (one.oldest_s, other.oldest_s) if age is not None]
    return QueueDepth(
        one.model,
        one.priority,
        one.waiting + other.waiting,
        one.running + other.running,
        max(ages, default=None),
        one.front + other.front,
        one.paused or other.paused,
    )


def worker_line(name: str, said: Mapping[str, str], now_ms: int) -> WorkerLine:
    """What a worker says, read with care: it may be of another version."""
    state = said.get("engine", "ready")
    return WorkerLine(
        worker=_printable(name),
        model=_printable(said.get("model", "")),
        host=_printable(said.get("host", "")),
        state="draining" if said.get("draining", "0") not in ("0", "") else _printable(state),
        slots=int(_number(said.get("slots")) or 0),
        running=int(_number(said.get("running")) or 0),
        owned=int(_number(said.get("owned")) or 0),
        tokens_per_s=_number(said.get("tokens_per_s")),
        kv_usage=_number(said.get("kv_usage")),
        seen_s=max(0.0, (now_ms - (_number(said.get("seen")) or now_ms)) / 1000),
    )


def _printable(text: str) -> str:
    """What may be shown on a terminal or a page of a text that anybody may have written."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:128])


def _number(value: str | None) -> float | None:
    """A finite number in a text; None for anything else."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def texts_of(reply: Any) -> dict[str, str]:
    """A map reply, flat or not, as text."""
    if not isinstance(reply, Mapping):
        reply = dict(zip(reply[::2], reply[1::2], strict=True))
    return {text_of(name): text_of(value) for name, value in reply.items()}


def text_of(value: Any) -> str:
    """Bytes of Redis as text; what is no UTF-8 becomes U+FFFD."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
