"""The states of a job, and every move between them.

            submit
              |
              v      claim
    +--->  waiting ---------->  running
    |         |                    |
    |         | cancel             | finish ------------------> finished
    |         | deadline           | fail, failures used up --> failed
    |         |                    | finish(cancelled) -------> cancelled
    |         |                    | deadline ----------------> expired
    |         |                    |
    |         +--> cancelled       | release, reclaim, fail with failures left
    |         +--> expired         |
    |         +--> failed          |
    +------------------------------+

`waiting -> failed` is the dead letter of a payload that nobody can decode. A job with a delay, or
one that waits for its next try, is `waiting` too: its due time says since when it may be claimed.

Invariant: a terminal state has no way out. The scripts in Redis hold it; this table names it.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """The state of a job, as it stands in its hash."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        """True when the job has ended."""
        return not MOVES[self]


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.CANCELLED, State.EXPIRED, State.FAILED}),
    State.RUNNING: frozenset(
        {State.WAITING, State.FINISHED, State.FAILED, State.CANCELLED, State.EXPIRED}
    ),
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
    State.EXPIRED: frozenset(),
}
