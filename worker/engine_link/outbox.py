"""The engine process's way out: events leave when the socket takes them, and merge until then.

Sending never blocks. What the worker has not read yet is held as at most one event per sequence,
so that a worker that stands still costs memory for the tokens of the jobs in flight and no more.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tokenfleet.engine.request import CoreEvent
from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.engine_link import frames

TOO_LARGE = "report_too_large"
"""Code of a sequence whose logprobs no frame can hold."""
_SENT = CoreEvent._fields.index("weights_version")
"""The fields of an event up to here go to the worker."""


class Outbox:
    """Frames on their way to the worker over a non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent: bytes | memoryview = b""
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
        self._free_slots = free_slots
        if not self.pending:  # nothing to merge with, as nearly always
            self._unsent = self._frames([event[:_SENT] for event in events], stats)
            self.flush()
            return
        for event in events:
            self._merge(event)
        self._preempted += stats.preempted_ids
        self._stats = frames.pack_stats(stats)
        self.flush()

    def put_frame(self, kind: str, *fields: Any) -> None:
        """Queue a frame that does not merge, behind everything put before it."""
        self._seal()
        self._unsent = bytes(self._unsent) + frames.encode(kind, *fields)
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
            left = sent < len(self._unsent)  # a view: a frame may have 64 MiB, and a send takes few
            self._unsent = memoryview(self._unsent)[sent:] if left else b""

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
        stats = frames.unpack_stats(self._stats)
        stats.preempted_ids = self._preempted
        events: list[Sequence[Any]] = list(self._events.values())
        self._unsent = bytes(self._unsent) + self._frames(events, stats)
        self._events, self._stats, self._preempted = {}, None, []

    def _frames(self, events: list[Sequence[Any]], stats: StepStats) -> bytes:
        """One frame, or as many as it takes for what a frame does not hold.

        Logprobs of long prompts are that large. A sequence whose event alone is too large is
        refused instead: it ends with that reason, and the others go on.
        """
        step = frames.encode(frames.STEP, events, frames.pack_stats(stats), self._free_slots)
        if len(step) <= frames.MAX_FRAME_BYTES or not events:
            return step
        if len(events) == 1:
            why = (
                f"its logprobs take {len(step)} bytes, and an engine reports at most "
                f"{frames.MAX_FRAME_BYTES} at once; ask for fewer, or of a shorter prompt"
            )
            refused = frames.encode(frames.REFUSED, events[0][0], TOO_LARGE, why)
            return refused + self._frames([], stats)
        half = len(events) // 2
        first = self._frames(events[:half], replace(stats, preempted_ids=[]))
        return first + self._frames(events[half:], stats)

    def _merge(self, event: CoreEvent) -> None:
        held = self._events.get((event.id, event.choice))
        if held is None:
            held = self._events[event.id, event.choice] = list(event[:_SENT])
            held[2] = list(event.token_ids)
            held[4] = event.logprobs and list(event.logprobs)
            return
        held[2] += event.token_ids
        held[3] = event.finish_reason
        if event.logprobs:
            held[4] = held[4] or []
            held[4] += event.logprobs
        held[5] = held[5] or event.prompt_logprobs
        held[6], held[7] = event.error, event.error_code
