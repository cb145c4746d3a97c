"""Sends jobs: packs them, spreads them over partitions, and puts each batch into one script call.

Invariant: a job's id is fixed before the first try, so a repeated call cannot make two jobs of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from tokenfleet.producer import keys
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.errors import IdempotencyMismatch, QueueFull
from tokenfleet.producer.request import MAX_JOB_BYTES, JobRequest
from tokenfleet.producer.scripts import SUBMIT

_FIELDS = 12
_KNOWN, _MISMATCH, _FULL = 1, 2, 3
_BATCH = 128
_FIRST_BATCH = 2
"""Of the first call, before the other one, where two do: a server tells whom it has woken once it
has done all that it was sent, and a worker begins with as many while the others are on their
way."""
_BATCH_BYTES = 1 << 20
_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Draft:
    """A job with its id, packed."""

    id: str
    partition: int
    request: JobRequest
    packed: bytes
    traceparent: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job that Redis has. `deduplicated`: an earlier submission made it."""

    id: str
    deduplicated: bool


class Submission:
    """Submits jobs through one connection."""

    def __init__(self, connection: Connection, *, max_job_bytes: int = MAX_JOB_BYTES) -> None:
        self._connection = connection
        self._max_job_bytes = max_job_bytes
        self._next_partition = 0

    def new_id(self, request: JobRequest) -> str:
        """An id in the partition that the job is to live in."""
        return keys.new_job_id(self._partition_for(request))

    def draft(
        self,
        request: JobRequest,
        trace: Mapping[str, str] | None = None,
        job_id: str | None = None,
    ) -> Draft:
        """Give a job its bytes, and its id. Raises InvalidJob when it is too large."""
        trace = trace or _own_trace(request)
        packed = request.pack(self._max_job_bytes, trace)
        if job_id is None:
            partition = self._partition_for(request)
            job_id = keys.new_job_id(partition)
        else:
            partition = keys.partition_of(job_id)
        return Draft(job_id, partition, request, packed, trace.get("traceparent", ""))

    async def send(self, drafts: Sequence[Draft]) -> list[Accepted]:
        """Submit all; the replies are in the order of `drafts`.

        Raises IdempotencyMismatch for the first job that met another one's key, and QueueFull when
        a tenant may not have more jobs waiting; jobs without that trouble have been submitted then.
        """
        replies: dict[str, tuple[int, str]] = {}
        gate = asyncio.Semaphore(_IN_FLIGHT)

        async def send_batch(batch: list[Draft]) -> None:
            async with gate:
                answers = await self._call(batch)
            for draft, (outcome, job_id) in zip(batch, answers):
                replies[draft.id] = (outcome, job_id.decode())

        short = self._connection.partitions == 1 and len(drafts) <= _BATCH
        batches = list(_batches(drafts, _FIRST_BATCH if short else _BATCH))
        if short and len(batches) > 1:
            await send_batch(batches.pop(0))
        sending = [asyncio.ensure_future(send_batch(batch)) for batch in batches]
        try:
            await asyncio.gather(*sending)
        finally:  # nothing more is sent once the caller has heard of one that failed
            for one in sending:
                one.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        accepted = [_accepted(draft, *replies[draft.id]) for draft in drafts]
        waits_ms = [int(reply) for outcome, reply in replies.values() if outcome == _FULL]
        if waits_ms:
            raise QueueFull(
                max(waits_ms) / 1000, [one.id if one is not None else None for one in accepted]
            )
        return [one for one in accepted if one is not None]

    async def _call(self, batch: list[Draft]) -> Any:
        partition = batch[0].partition
        names = self._connection.keys(partition)
        classes = dict.fromkeys((draft.request.model, draft.request.priority) for draft in batch)
        script_keys = [names.delay, names.deadline, *(names.queue(*one) for one in classes)]
        args: list[Any] = [_FIELDS]
        for draft in batch:
            args += _arguments(draft)
        patience_s = self._connection.connect_timeout_s
        return await self._connection.run(
            SUBMIT, partition, script_keys, args, patience_s=patience_s, often=True
        )

    def _partition_for(self, request: JobRequest) -> int:
        partitions = self._connection.partitions
        if request.idempotency_key is not None:
            return keys.partition_for_key(request.tenant, request.idempotency_key, partitions)
        self._next_partition = (self._next_partition + 1) % partitions
        return self._next_partition


def _arguments(draft: Draft) -> tuple[Any, ...]:
    request = draft.request
    key = request.idempotency_key
    return (
        draft.id,
        draft.packed,
        request.model,
        request.priority,
        request.tenant,
        0 if request.deadline_s is None else max(1, round(request.deadline_s * 1000)),
        round(request.delay_s * 1000),
        "" if request.max_failures is None else request.max_failures,
        request.on_disconnect,
        "" if key is None else payload_digest(request),
        key or "",
        draft.traceparent,
    )


def payload_digest(request: JobRequest) -> str:
    """By which an idempotency key knows the job: the trace that it was asked in does not count."""
    blank = {"traceparent": "", "tracestate": ""}
    return blake2b(request.pack(1 << 62, blank), digest_size=16).hexdigest()


def _own_trace(request: JobRequest) -> dict[str, str]:
    given = {"traceparent": request.traceparent, "tracestate": request.tracestate}
    return {name: value for name, value in given.items() if value is not None}


def _batches(drafts: Sequence[Draft], most: int) -> Iterator[list[Draft]]:
    """Drafts of one partition together, bounded in bytes and number: `most` in the first."""
    groups: dict[int, list[Draft]] = {}
    sizes: dict[int, int] = {}
    for draft in drafts:
        group = groups.setdefault(draft.partition, [])
        size = sizes.get(draft.partition, 0) + len(draft.packed)
        if group and (len(group) >= most or size > _BATCH_BYTES):
            yield groups.pop(draft.partition)
            most = _BATCH
            group, size = groups.setdefault(draft.partition, []), len(draft.packed)
        group.append(draft)
        sizes[draft.partition] = size
    yield from groups.values()


def _accepted(draft: Draft, outcome: int, job_id: str) -> Accepted | None:
    """What became of one job; None: its tenant has too many waiting."""
    if outcome == _MISMATCH:
        raise IdempotencyMismatch(draft.request.idempotency_key or "", job_id)
    return None if outcome == _FULL else Accepted(job_id, outcome == _KNOWN)
