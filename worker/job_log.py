"""What a worker writes of its jobs: their events, their ends, and all again when Redis forgot.

Invariant: nothing is written for a job whose attempt is not the one it was claimed with, and what
is written twice is in the log once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenfleet.producer.connection import Connection
from tokenfleet.producer.keys import partition_of
from tokenfleet.producer.protocol import EventError, JobResult, State
from tokenfleet.producer.scripts import Script, load
from tokenfleet.producer.submission import payload_digest
from tokenfleet.producer.wire import write_for_script
from tokenfleet.worker.claims import (
    BEHIND,
    ClaimedJob,
    Emission,
    EmitOutcome,
    Entries,
    LogBehind,
    Terms,
    by_partition,
    last_reason,
    outcome_of,
    together,
)

EMIT, FINISH, ADOPT = (load("tokenfleet.worker.lua", name) for name in ("emit", "finish", "adopt"))

PATIENCE_S = 0.5
"""How long a call that may be repeated is repeated over a lost connection."""

Codes = list[tuple[str, int, int]]
"""What emit said of jobs: id, bits, offset that the log ends at."""


class JobLog:
    """Writes for one worker. JobQueue has the contracts of the methods."""

    def __init__(self, connection: Connection, terms: Terms) -> None:
        self._connection = connection
        self._terms = terms

    async def emit(self, emissions: list[Emission]) -> EmitOutcome:
        """One call per partition."""
        if self._connection.partitions == 1:
            return outcome_of(await self._emit_in(0, emissions))
        groups = by_partition(emissions, lambda one: one[0])
        found = await together([self._emit_in(*group) for group in groups.items()])
        return outcome_of([said for codes in found for said in codes])

    async def _emit_in(self, partition: int, group: list[Emission]) -> Codes:
        if not group:
            return []
        keys = [self._connection.keys(partition).job(group[0][0])]
        args = [write_for_script(group)]
        reply = await self._connection.run(
            EMIT, partition, keys, args, patience_s=PATIENCE_S, often=True
        )
        triples = zip(*[iter(reply)] * 3)
        return [(group[position - 1][0], code, offset) for position, code, offset in triples]

    async def finish(
        self,
        job: ClaimedJob,
        entries: Entries,
        result: JobResult | None,
        *,
        state: State,
        error: EventError | None,
    ) -> bool:
        names = self._connection.keys(partition_of(job.id))
        args: list[Any] = [job.id, job.attempt, state.value]
        args += [b"" if result is None else replace(result, worker=self._terms.worker_id).pack()]
        args += ["", ""] if error is None else [error.code, error.message]
        args += [*self._terms.ttls, last_reason(state, result), *entries]
        keys = [names.job(job.id), names.events(job.id)]
        code, detail = await self._run(FINISH, names.partition, keys, args)
        if code == BEHIND:
            raise LogBehind(job.id, int(detail))
        return bool(code)

    async def adopt(self, job: ClaimedJob, entries: Entries) -> ClaimedJob | None:
        names = self._connection.keys(partition_of(job.id))
        request, stream = job.request, names.queue(self._terms.model_name, job.priority)
        keys = [names.job(job.id), names.events(job.id), stream]
        keys += [names.live(self._terms.model_name), names.deadline]
        args: list[Any] = [job.id, self._terms.worker_id, self._terms.lease_ms, job.attempt]
        args += [request.pack(1 << 62), request.model, job.priority, request.tenant]
        args += [job.deadline_ms or 0, job.submitted_ms]
        args += ["" if request.max_failures is None else request.max_failures]
        # the offset at the last failure lies at or before that of the claim: the claim does not say
        args += [request.on_disconnect, job.failures, job.offset if job.failures else 0]
        key = request.idempotency_key
        args += [job.preempted, request.traceparent or "", key or ""]
        args += [payload_digest(request) if key else "", *entries]
        attempt = await self._run(ADOPT, names.partition, keys, args)
        if not attempt:
            return None
        offset = entries[-1] if entries else 0
        return replace(job, attempt=attempt, offset=offset, stream=stream)

    async def _run(self, script: Script, partition: int, keys: list[str], args: list[Any]) -> Any:
        return await self._connection.run(script, partition, keys, args, patience_s=PATIENCE_S)
