"""The engine process's way out: events leave when the socket takes them, and merge until then.

Sending never blocks. What the worker has not read yet is held as at most one event per sequence,
so that a worker that stands still costs memory for the tokens of the jobs in flight and no more.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

from tokenfleet.engine.request import CoreEvent
from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.engine_link import frames


class Outbox:
    """Frames on their way to the worker over a non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent = b""
        self._events: dict[tuple[str, int], list[Any]] = {}
        self._stats: list[Any] | None = None
        self._preempted: list[str] = []
        self._free_slots = 0

    @property
    def pending(self) -> bool:
        """Whether something waits for the socket."""
        return bool(self._unsent) or self._stats is not None

    def put(self, events: Iterable[CoreEvent], stats: StepStats, free_slots: int) -> None:
        """Take what one step made, merging it with what has not left yet."""
        for event in events:
            self._merge(event)
        self._preempted += stats.preempted_ids
        self._stats = frames.pack_stats(stats)
        self._free_slots = free_slots
        self.flush()

    def put_frame(self, kind: str, *fields: Any) -> None:
        """Queue a frame that does not merge, behind everything put before it."""
        self._seal()
        self._unsent += frames.encode(kind, *fields)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        while True:
            if not self._unsent:
                self._seal()
            if not self._unsent:
                return
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    def close(self, timeout_s: float) -> None:
        """Send what is left, waiting for the reader no longer than this."""
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(self._unsent)
        except OSError:
            return

    def _seal(self) -> None:
        """Turn the merged events into a frame."""
        if self._stats is None:
            return
        events = list(self._events.values())
        stats = frames.unpack_stats(self._stats)
        stats.preempted_ids = self._preempted
        self._unsent += frames.encode(
            frames.STEP, events, frames.pack_stats(stats), self._free_slots
        )
        self._events, self._stats, self._preempted = {}, None, []

    def _merge(self, event: CoreEvent) -> None:
        held = self._events.get((event.id, event.choice))
        if held is None:
            self._events[event.id, event.choice] = [
                event.id,
                event.choice,
                list(event.token_ids),
                event.finish_reason,
                event.logprobs,
                event.prompt_logprobs,
                event.error,
            ]
            return
        held[2] += event.token_ids
        held[3] = event.finish_reason
        if event.logprobs:
            held[4] = [*(held[4] or ()), *event.logprobs]
        held[5] = held[5] or event.prompt_logprobs
        held[6] = event.error
