"""Batches under way: each driven by a task, from its record to its output files.

    validating --> in_progress --> finalizing --> completed | expired
        |              '--> cancelling --> cancelled
        '--> failed

What is done is in the batch's own files (producer/batch): a gateway that starts takes up every
batch that had not ended, and no line is run twice. Of several gateways on one folder, one drives a
batch; the others look again until it has ended or they can.

Invariant: a record whose status is terminal never changes again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenfleet.producer.batch import (
    Batch,
    BatchBusy,
    BatchError,
    BatchRefused,
    BatchSettings,
    FileReport,
    FileRules,
    Kind,
    Phase,
    Progress,
    Summary,
)
from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.errors import TokenfleetError
from tokenfleet.producer.gateway.sse import end
from tokenfleet.producer.gateway.store import BatchRecord, TenantStore

TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
AGAIN_S = 2.0
"""Pause before a batch is looked at again: Redis is away, or another gateway has it."""
MOST_ERRORS = 100
EXPIRED = "batch_expired"

log = logging.getLogger(__name__)


class Desk:
    """Drives the batches of all tenants.

    Args:
        root: the files_dir.
    """

    def __init__(self, root: Path, client: AsyncClient) -> None:
        self._root = root
        self._client = client
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._cancelling: set[tuple[str, str]] = set()
        self._changing = asyncio.Lock()

    def store(self, tenant: str) -> TenantStore:
        """A tenant's files."""
        return TenantStore(self._root, tenant)

    async def take_up(self) -> None:
        """Drive every batch that has not ended."""
        for store in await asyncio.to_thread(lambda: list(TenantStore.all(self._root))):
            for record in await asyncio.to_thread(store.batches):
                self.drive(store, record)

    def drive(self, store: TenantStore, record: BatchRecord) -> None:
        """See to it that a batch gets on."""
        place = (store.tenant, record.id)
        if record.status in TERMINAL or place in self._tasks:
            return
        task = asyncio.create_task(self._drive(store, record.id))
        self._tasks[place] = task
        task.add_done_callback(lambda task: self._ended(place, task))

    def _ended(self, place: tuple[str, str], task: asyncio.Task[None]) -> None:
        """The batch waits for the next start when what drives it broke."""
        self._tasks.pop(place, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch_left", exc_info=error, extra={"fields": {"batch": place[1]}})

    async def cancel(self, store: TenantStore, record: BatchRecord) -> BatchRecord:
        """Ask for a batch's end; what has come by then stays."""
        record = await self._change(
            store, record.id, {"status": "cancelling", "cancelling_at": _now()}
        )
        self._cancelling.add((store.tenant, record.id))
        await asyncio.to_thread(store.batch_files(record.id).cancel.touch)
        self.drive(store, record)
        return record

    async def aclose(self) -> None:
        """Stop here; jobs that are on their way go on, and whoever takes it up collects them."""
        for task in list(self._tasks.values()):
            await end(task)

    async def _drive(self, store: TenantStore, batch_id: str) -> None:
        while True:
            record = await asyncio.to_thread(store.batch, batch_id)
            if record is None or record.status in TERMINAL:
                self._cancelling.discard((store.tenant, batch_id))
                return
            try:
                await self._advance(store, record)
            except BatchRefused as error:
                await self._fail(store, batch_id, _problems(error.report))
            except BatchBusy:
                await asyncio.sleep(AGAIN_S)
            except (BatchError, OSError) as error:
                log.error("batch_broke", extra={"fields": {"batch": batch_id, "error": str(error)}})
                problem = {"code": "batch_broke", "message": str(error)}
                await self._fail(store, batch_id, [problem])
            except TokenfleetError as error:
                log.warning(
                    "batch_waits", extra={"fields": {"batch": batch_id, "error": str(error)}}
                )
                await asyncio.sleep(AGAIN_S)

    async def _advance(self, store: TenantStore, record: BatchRecord) -> None:
        """From wherever it is to its end. Raises what Batch raises."""
        batch = await asyncio.to_thread(_prepared, store, record)
        record = await self._change(
            store,
            record.id,
            {"status": "in_progress", "in_progress_at": _now()},
            only_from="validating",
        )

        def say_again(_: Progress) -> None:
            """A batch that begins takes an older wish for its end away."""
            if (store.tenant, record.id) in self._cancelling:
                batch.files.cancel.touch()

        if record.status == "cancelling":
            summary = await batch.cancel(self._client)
        else:
            summary = await batch.run(self._client, on_progress=say_again)
        await self._finish(store, record.id, summary)

    async def _finish(self, store: TenantStore, batch_id: str, summary: Summary) -> None:
        """Hand out the files and say how it ended."""
        finalizing = {"status": "finalizing", "finalizing_at": _now()}
        record = await self._change(store, batch_id, finalizing, only_from="in_progress")
        made = await asyncio.to_thread(_hand_out, store, record)
        counts = {"total": summary.total, "completed": summary.completed, "failed": summary.failed}
        status = "expired" if EXPIRED in summary.codes else "completed"
        if summary.phase is Phase.CANCELLED:
            status = "cancelled"
        ended = {"status": status, f"{status}_at": _now(), "request_counts": counts}
        await self._change(store, batch_id, {**made, **ended})
        log.info("batch_ended", extra={"fields": {"batch": batch_id, "status": status, **counts}})

    async def _fail(
        self, store: TenantStore, batch_id: str, errors: Sequence[Mapping[str, Any]]
    ) -> None:
        failed = {"status": "failed", "failed_at": _now(), "errors": tuple(errors[:MOST_ERRORS])}
        await self._change(store, batch_id, failed)
        log.info("batch_ended", extra={"fields": {"batch": batch_id, "status": "failed"}})

    async def _change(
        self,
        store: TenantStore,
        batch_id: str,
        changes: Mapping[str, Any],
        *,
        only_from: str | None = None,
    ) -> BatchRecord:
        """Change a record as it is now, one at a time; not a terminal one.

        only_from: the status that it must have; with another it stays as it is.
        """
        async with self._changing:
            record = await asyncio.to_thread(store.batch, batch_id)
            assert record is not None, "a batch's record is never deleted"
            if record.status in TERMINAL or only_from not in (None, record.status):
                return record
            record = replace(record, **changes)
            await asyncio.to_thread(store.write, record)
            return record

    def counts(self, store: TenantStore, record: BatchRecord) -> BatchRecord:
        """The record with how far it is now. Blocks."""
        if record.status in TERMINAL or record.in_progress_at is None:
            return record
        try:
            glance = Batch.open(store.batch_files(record.id)).glance()
        except (BatchError, OSError):
            return record
        counts = {"total": glance.total, "completed": glance.completed, "failed": glance.failed}
        return replace(record, request_counts=counts)


def _hand_out(store: TenantStore, record: BatchRecord) -> dict[str, str]:
    """Make files of what was written; an empty one is none."""
    files = store.batch_files(record.id)
    made = {}
    for kind, path in (("output", files.output), ("error", files.errors)):
        if path.exists() and path.stat().st_size:
            linked = store.link(path, f"{record.id}_{kind}.jsonl", "batch_output")
            made[f"{kind}_file_id"] = linked.id
    return made


def _prepared(store: TenantStore, record: BatchRecord) -> Batch:
    """The batch, its input checked. Blocks. Raises BatchRefused."""
    settings = BatchSettings(
        skip="bodies",
        tenant=store.tenant,
        window_s=float(record.expires_at - record.created_at),
    )
    rules = FileRules(endpoint=record.endpoint)
    return Batch.prepare(store.batch_files(record.id), rules, settings)


def _problems(report: FileReport) -> list[dict[str, Any]]:
    """What stops a batch, as the API tells it."""
    stopping = (p for p in report.problems if p.kind in (Kind.FILE, Kind.LINE))
    return [
        {"code": p.code, "message": p.message, "param": p.param, "line": p.line} for p in stopping
    ]


def _now() -> int:
    return int(time.time())
