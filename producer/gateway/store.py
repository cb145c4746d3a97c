"""Uploaded files and the records of batches, on disk, a folder for each tenant.

    <files_dir>/tenant-<name>/files/<file id>          the bytes
    <files_dir>/tenant-<name>/files/<file id>.json     what is said of them
    <files_dir>/tenant-<name>/batches/<batch id>/      batch.json, output, errors, state

Everything here blocks: call it in a thread. A record is replaced in one move, so that a kill leaves
the old one or the new one; bytes come before their record.

Invariant: an id that a caller sent names nothing outside its own tenant's folder.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from tokenfleet.producer.batch import BatchFiles

_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
MOST_NAME = 255


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file, as the API describes it."""

    id: str
    filename: str
    bytes: int
    created_at: int
    purpose: str = "batch"

    def as_api(self) -> dict[str, Any]:
        """The `file` object of the OpenAI API."""
        return {**asdict(self), "object": "file", "status": "processed", "expires_at": None}


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch, as the API describes it; times are seconds since the epoch, None: not yet."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    metadata: Mapping[str, str] | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Mapping[str, int] = field(default_factory=dict)

    def as_api(self) -> dict[str, Any]:
        """The `batch` object of the OpenAI API."""
        errors = {"object": "list", "data": list(self.errors)} if self.errors else None
        counts = {"total": 0, "completed": 0, "failed": 0, **self.request_counts}
        return {**asdict(self), "object": "batch", "errors": errors, "request_counts": counts}


class TenantStore:
    """The files and batches of one tenant."""

    def __init__(self, root: Path, tenant: str) -> None:
        folder = root / f"tenant-{tenant}"  # the prefix makes a folder's name of `..`, too
        self.tenant = tenant
        self._files = folder / "files"
        self._batches = folder / "batches"

    @classmethod
    def all(cls, root: Path) -> Iterator[Self]:
        """The stores of all tenants that have one."""
        for folder in sorted(root.glob("tenant-*")):
            yield cls(root, folder.name.removeprefix("tenant-"))

    # files

    def keep(self, source: BinaryIO, filename: str, purpose: str = "batch") -> FileRecord:
        """Copy a file in."""
        self._files.mkdir(parents=True, exist_ok=True)
        file_id = f"file-{secrets.token_hex(12)}"
        scratch = self._files / f"{file_id}.part"
        with scratch.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        return self._record(file_id, scratch, filename, purpose)

    def link(self, path: Path, filename: str, purpose: str) -> FileRecord:
        """Take in a file that is on this disk already, without a copy."""
        self._files.mkdir(parents=True, exist_ok=True)
        file_id = f"file-{secrets.token_hex(12)}"
        scratch = self._files / f"{file_id}.part"
        os.link(path, scratch)
        return self._record(file_id, scratch, filename, purpose)

    def file(self, file_id: str) -> FileRecord | None:
        """None when there is none."""
        if _FILE_ID.fullmatch(file_id) is None:
            return None
        found = _read(self._files / f"{file_id}.json")
        return None if found is None else FileRecord(**found)

    def path(self, record: FileRecord) -> Path:
        """Where its bytes are."""
        return self._files / record.id

    def files(self) -> list[FileRecord]:
        """Newest first."""
        found = [self.file(path.stem) for path in self._files.glob("file-*.json")]
        kept = [record for record in found if record is not None]
        return sorted(kept, key=lambda record: (-record.created_at, record.id))

    def forget(self, record: FileRecord) -> None:
        """Delete a file. A batch that runs on it keeps its own way to the bytes."""
        (self._files / f"{record.id}.json").unlink(missing_ok=True)
        self.path(record).unlink(missing_ok=True)

    # batches

    def begin(self, record: BatchRecord, source: FileRecord) -> BatchFiles:
        """Make the folder of a new batch, with its input in it."""
        folder = self._batches / record.id
        folder.mkdir(parents=True)
        files = self.batch_files(record.id)
        os.link(self.path(source), files.input)
        self.write(record)
        return files

    def batch_files(self, batch_id: str) -> BatchFiles:
        """Where a batch reads and writes."""
        return BatchFiles.beside(self._batches / batch_id / "batch.jsonl")

    def batch(self, batch_id: str) -> BatchRecord | None:
        """None when there is none."""
        if _BATCH_ID.fullmatch(batch_id) is None:
            return None
        found = _read(self._batches / batch_id / "batch.json")
        if found is None:
            return None
        return BatchRecord(**{**found, "errors": tuple(found["errors"])})

    def batches(self) -> list[BatchRecord]:
        """Newest first."""
        found = [self.batch(folder.name) for folder in self._batches.glob("batch_*")]
        kept = [record for record in found if record is not None]
        return sorted(kept, key=lambda record: (-record.created_at, record.id))

    def write(self, record: BatchRecord) -> None:
        """Replace a batch's record."""
        _write(self._batches / record.id / "batch.json", asdict(record))

    def _record(self, file_id: str, scratch: Path, filename: str, purpose: str) -> FileRecord:
        name = Path(filename.replace("\\", "/")).name[-MOST_NAME:] or "upload.jsonl"
        size = scratch.stat().st_size
        scratch.replace(self._files / file_id)
        record = FileRecord(file_id, name, size, int(time.time()), purpose)
        _write(self._files / f"{file_id}.json", asdict(record))
        return record


def new_batch_id() -> str:
    """As OpenAI's look; nobody can guess one."""
    return f"batch_{secrets.token_hex(12)}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
