"""Sequences without a slot, in order of (priority, arrival).

A sequence is in the heap at most once; one that ended while waiting is dropped when it comes up, so
ten thousand waiting sequences cost a step nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from tokenfleet.engine.scheduling.sequence import Sequence, SequenceState


class WaitingQueue:
    """WAITING sequences by order; HELD ones are only counted, their parent knows them."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Sequence]] = []
        self._tie = count()
        self.num_waiting = 0
        self.num_held = 0

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in self._heap if entry[2].state is SequenceState.WAITING)

    def push(self, sequence: Sequence) -> None:
        """Let it wait at its place."""
        sequence.move(SequenceState.WAITING)
        heapq.heappush(self._heap, (sequence.order, next(self._tie), sequence))
        self.num_waiting += 1

    def hold(self, sequence: Sequence, parent: Sequence) -> None:
        """Keep it back until `release(parent)`."""
        sequence.move(SequenceState.HELD)
        parent.children.append(sequence)
        self.num_held += 1

    def release(self, parent: Sequence) -> None:
        """The parent's prompt is computed, or it is gone: its children wait like anyone."""
        children, parent.children = parent.children, []
        for child in children:
            if child.state is SequenceState.HELD:
                self.num_held -= 1
                self.push(child)

    def first(self) -> Sequence | None:
        """The one to admit next, left where it is."""
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.state is SequenceState.WAITING:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop_first(self) -> None:
        """Take out the one that `first` returned."""
        heapq.heappop(self._heap)
        self.num_waiting -= 1

    def ended(self, was: SequenceState) -> None:
        """A sequence in state `was` finished without a slot."""
        if was is SequenceState.HELD:
            self.num_held -= 1
        elif was is SequenceState.WAITING:
            self.num_waiting -= 1
