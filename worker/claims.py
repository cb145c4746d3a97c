"""What a worker holds and hands over: claimed jobs, their entries, and what Redis said of them.

Invariant: the events in a job's entries follow each other without a gap, and none of them ends its
stream: the script that ends the job makes that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenfleet.producer.errors import BrokerUnavailable, TokenfleetError
from tokenfleet.producer.protocol import Event, JobRequest, JobResult, State

FENCED, BEHIND, CANCELLED, EXPIRED = 1, 2, 4, 8
"""Bits of what emit and renew say of a job."""

Item = TypeVar("Item")


class LogBehind(TokenfleetError):
    """Redis has lost part of the job's log: send again from `logged`."""

    def __init__(self, job_id: str, logged: int) -> None:
        super().__init__(f"the log of job {job_id} ends at offset {logged}; send again from there")
        self.job_id = job_id
        self.logged = logged


class NothingTaken(BrokerUnavailable):
    """Redis was not reached, and had not been asked yet for anything that takes jobs."""


@dataclass(frozen=True, slots=True)
class Terms:
    """In whose name jobs are held, and what is granted them."""

    worker_id: str
    model_name: str
    lease_ms: int
    max_failures: int
    """Of jobs that do not say."""
    result_ttl_ms: int
    log_ttl_ms: int

    @property
    def ttls(self) -> tuple[int, int]:
        """As the scripts take them."""
        return self.result_ttl_ms, self.log_ttl_ms


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job under this worker's lease, as it was when claimed."""

    id: str
    attempt: int
    """The fencing token: goes with every call about the job."""
    request: JobRequest
    offset: int
    """Output tokens in the log: where this attempt goes on."""
    logged: tuple[Event, ...]
    """What earlier attempts logged; empty on a first claim."""
    failures: int
    priority: str
    deadline_ms: int | None
    submitted_ms: int
    claimed_ms: int
    """Server's clock, as the others."""
    preempted: int = 0
    """How often it has made way for a more urgent job."""
    by_right: bool = False
    """It was claimed before more urgent ones, for its class's floor: it makes way for nobody."""
    stream: str = field(repr=False, default="")
    entry: str = field(repr=False, default="")


Entries = list[Any]
"""Events of a job as the scripts take them, flat: the offset that they start at, then for each its
bytes and the offset after it. So the last one is the offset of what follows. Empty: no events."""

Emission = tuple[str, int, Entries]
"""What emit takes of one job: id, attempt, entries. 256 of them go in each flush."""


@dataclass(frozen=True, slots=True)
class EmitOutcome:
    """What emit found out, as job ids."""

    fenced: frozenset[str]
    """Another attempt's, or ended: stop and throw away."""
    behind: frozenset[str]
    """Nothing was written: the log does not end where the entries start, see `logged`."""
    cancelled: frozenset[str]
    """To be ended: someone asked, the subscribers left, or the deadline passed."""
    expired: frozenset[str] = frozenset()
    """Those of `cancelled` whose deadline passed."""
    logged: Mapping[str, int] = field(default_factory=dict)
    """Offset that the log ends at, for those behind."""


ALL_LOGGED = EmitOutcome(frozenset(), frozenset(), frozenset())
"""There was nothing to say of any job."""


def claimed_job(raw: Sequence[Any], now_ms: int) -> ClaimedJob:
    """The job in one line of claim's reply. Raises UndecodableJob."""
    job_id, attempt, packed, offset, failures, priority, deadline, submitted = raw[:8]
    return ClaimedJob(
        id=text(job_id),
        attempt=attempt,
        request=JobRequest.unpack(packed),
        offset=offset,
        logged=tuple(Event.unpack(payload) for payload in raw[10]),
        failures=failures,
        priority=text(priority),
        deadline_ms=deadline or None,
        submitted_ms=submitted,
        claimed_ms=now_ms,
        preempted=raw[11],
        stream=text(raw[8]),
        entry=text(raw[9]),
    )


def outcome_of(codes: Sequence[tuple[str, int, int]]) -> EmitOutcome:
    """What emit said, as job id, bits and offset that the log ends at."""

    def having(bits: int) -> frozenset[str]:
        return frozenset(job_id for job_id, code, _ in codes if code & bits)

    if not codes:
        return ALL_LOGGED
    return EmitOutcome(
        fenced=having(FENCED),
        behind=having(BEHIND),
        cancelled=having(CANCELLED | EXPIRED),
        expired=having(EXPIRED),
        logged={job_id: offset for job_id, code, offset in codes if code & BEHIND},
    )


def flat(events: Sequence[Event]) -> Entries:
    """Events as entries."""
    entries: Entries = [event.offset for event in events[:1]]
    for event in events:
        entries += (event.pack(), event.end)
    return entries


def last_reason(state: State, result: JobResult | None) -> str:
    """The finish reason of a terminal event that the script makes."""
    if result is not None and result.finish_reason:
        return result.finish_reason
    return {State.FAILED: "error", State.FINISHED: "stop"}.get(state, state.value)


def by_partition(items: Iterable[Item], job_id: Callable[[Item], str]) -> dict[int, list[Item]]:
    """Items by the partition that their job lives in: one call each."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        # the part after the dot; ids that come here have been checked when they came in
        groups.setdefault(job_id(item).rpartition(".")[2], []).append(item)
    return {int(partition): group for partition, group in groups.items()}


def text(value: Any) -> str:
    """A reply that is text."""
    return value.decode() if isinstance(value, bytes) else str(value)


async def together(calls: Sequence[Awaitable[Item]]) -> list[Item]:
    """The results of calls to several partitions, made at once.

    Raises the first error, once all have ended.
    """
    if len(calls) == 1:
        return [await calls[0]]
    found = await asyncio.gather(*calls, return_exceptions=True)
    done: list[Item] = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        done.append(one)
    return done
