"""A batch's jobs in Redis: sent, looked at, cancelled, and let go once they are collected.

Invariant: everything here may be repeated; a job's id follows from its batch and line.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenfleet.producer import tracing
from tokenfleet.producer.batch.check import BatchLine
from tokenfleet.producer.batch.records import Ended
from tokenfleet.producer.batch.responses import ResponseShape
from tokenfleet.producer.batch.state import BatchState
from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.errors import QueueFull
from tokenfleet.producer.keys import partition_of
from tokenfleet.producer.request import JobRequest
from tokenfleet.producer.scripts import load
from tokenfleet.producer.states import State

ENDED = load("tokenfleet.producer.lua", "ended")
COLLECTED = load("tokenfleet.producer.lua", "collected")

AT_ONCE = 256
"""Jobs that one call looks at: Redis does nothing else meanwhile."""
MOST_BYTES = 4 << 20
KEPT_MS = 600_000
"""Collected results are kept this long, for whoever looks into a batch that has just run."""
_CANCELS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Flight:
    """A line whose job is on its way; all that is needed to write its result."""

    line: int
    offset: int
    custom_id: str
    shape: ResponseShape
    job_id: str


@dataclass(slots=True)
class Look:
    """What a look at flights found."""

    ended: list[tuple[Flight, Ended]] = field(default_factory=list)
    gone: list[Flight] = field(default_factory=list)
    """Redis does not know their jobs."""
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    """Output tokens of running jobs so far."""

    @property
    def seen(self) -> int:
        """How many flights it told about; the rest did not fit into the replies."""
        return self.running + self.waiting + len(self.ended) + len(self.gone)

    def add(self, other: Look) -> None:
        """Take in a look at other flights."""
        self.ended += other.ended
        self.gone += other.gone
        self.running += other.running
        self.waiting += other.waiting
        self.tokens += other.tokens


@dataclass(slots=True)
class Sent:
    """What became of lines that were sent."""

    accepted: list[BatchLine] = field(default_factory=list)
    refused: list[BatchLine] = field(default_factory=list)
    """The queue is full: to be sent again after retry_after_s."""
    retry_after_s: float = 0.0


class Remote:
    """The jobs of one batch, through one client."""

    def __init__(self, client: AsyncClient, state: BatchState) -> None:
        self._client = client
        self._state = state

    def flight(self, line: BatchLine) -> Flight:
        """The job that a line is or will be."""
        job_id = self._state.job_id(line.number)
        return Flight(line.number, line.offset, line.custom_id, line.request.shape, job_id)

    async def send(self, lines: Sequence[BatchLine], left_s: float | None) -> Sent:
        """Submit lines; one that was submitted before stays as it is.

        left_s: until the completion window closes; None: it does not.

        Raises:
            BrokerUnavailable: some may have been accepted; send all of them again.
        """
        link = self._client.link
        await link.connection.ready()
        groups: dict[str, list[BatchLine]] = defaultdict(list)
        for line in lines:
            groups[line.request.model].append(line)
        priority = self._state.settings.priority
        sent = Sent()
        for model, group in groups.items():
            with tracing.sending(model, priority, batch=len(group)) as carrier:
                ids = [self._state.job_id(line.number) for line in group]
                jobs = [self._job(line, left_s) for line in group]
                drafts = [link.submission.draft(job, carrier, id) for job, id in zip(jobs, ids)]
                try:
                    await link.submission.send(drafts)
                    accepted = set(ids)
                except QueueFull as error:
                    accepted = {job_id for job_id in error.job_ids if job_id is not None}
                    sent.retry_after_s = max(sent.retry_after_s, error.retry_after_s)
            for line, job_id in zip(group, ids):
                (sent.accepted if job_id in accepted else sent.refused).append(line)
        return sent

    async def look(self, flights: Sequence[Flight], *, most_bytes: int = MOST_BYTES) -> Look:
        """How the jobs are; what has ended comes with its result, as much as most_bytes allow."""
        found = Look()
        for partition, group in _by_partition(flights):
            connection = self._client.link.connection
            names = connection.keys(partition)
            keys = [names.job(flight.job_id) for flight in group]
            patience_s = connection.connect_timeout_s
            reply = await connection.run(
                ENDED, partition, keys, [most_bytes], patience_s=patience_s
            )
            found.running += reply[0]
            found.waiting += reply[1]
            found.tokens += reply[2]
            for index, state, result, code, message, attempts, claimed, ended in reply[3:]:
                flight = group[index - 1]
                if not state:
                    found.gone.append(flight)
                    continue
                job = Ended(
                    flight.job_id,
                    State(state.decode()),
                    result or None,
                    code.decode(),
                    message.decode(errors="replace"),
                    attempts,
                    claimed,
                    ended,
                )
                found.ended.append((flight, job))
        return found

    async def expire(self, flights: Iterable[Flight]) -> None:
        """Look at jobs one by one: one that waits past its deadline ends by being looked at."""
        reader = self._client.link.reader
        for flight in flights:
            await reader.look(flight.job_id)

    async def collected(self, job_ids: Iterable[str]) -> None:
        """The results of these jobs are on the disk: Redis need not keep them for long."""
        groups: dict[int, list[str]] = defaultdict(list)
        connection = self._client.link.connection
        for job_id in job_ids:
            names = connection.keys(partition := partition_of(job_id))
            groups[partition] += (names.job(job_id), names.events(job_id))
        for partition, keys in groups.items():
            for start in range(0, len(keys), 2 * AT_ONCE):
                part = keys[start : start + 2 * AT_ONCE]
                await connection.run(
                    COLLECTED, partition, part, [KEPT_MS], patience_s=connection.connect_timeout_s
                )

    async def cancel(self, flights: Sequence[Flight]) -> None:
        """Ask for the end of jobs; those that are not there or have ended stay as they are."""
        reader = self._client.link.reader
        for start in range(0, len(flights), _CANCELS_AT_ONCE):
            part = flights[start : start + _CANCELS_AT_ONCE]
            await asyncio.gather(*(reader.cancel(flight.job_id) for flight in part))

    def _job(self, line: BatchLine, left_s: float | None) -> JobRequest:
        settings = self._state.settings
        return JobRequest(
            **line.request.job,
            priority=settings.priority,
            tenant=settings.tenant,
            deadline_s=left_s,
        )


def _by_partition(flights: Sequence[Flight]) -> Iterable[tuple[int, list[Flight]]]:
    """Flights of one partition together, at most AT_ONCE, in their order."""
    groups: dict[int, list[Flight]] = defaultdict(list)
    for flight in flights:
        group = groups[partition_of(flight.job_id)]
        group.append(flight)
    for partition, group in groups.items():
        for start in range(0, len(group), AT_ONCE):
            yield partition, group[start : start + AT_ONCE]
