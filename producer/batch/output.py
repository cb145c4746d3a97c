"""The output and the error file: appended to, read again after a kill, locked while in use.

Lines are handed to the system after every round of results, so a killed process loses none of them;
they are forced to the disk once a second and at the end, so a machine that loses its power loses at
most the last second, which is run or fetched again. A line that was cut off is dropped.

Invariant: a line number is in the two files at most once.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Self

from tokenfleet.producer.batch.records import Record, line_of
from tokenfleet.producer.batch.state import BatchError, BatchFiles, BatchState
from tokenfleet.producer.batch.tally import Tally

_BUFFER = 1 << 20
_TRIES, _PAUSE_S = 5, 0.05


class BatchBusy(BatchError):
    """Another process runs this batch."""


class Output:
    """Both files of one batch, opened for writing. `done[n]` is set for every line n that is in."""

    def __init__(self, files: BatchFiles, state: BatchState) -> None:
        self._files = files
        self._state = state
        self.done = bytearray(state.lines + 1)
        self.tally = Tally()
        self._handles: dict[bool, BinaryIO] = {}
        self._dirty = False

    def open(self) -> Self:
        """Lock, cut off what is torn, count what is there.

        Raises:
            BatchBusy: another process has it.
            BatchError: a line that is not this batch's.
        """
        try:
            for failed, path in ((False, self._files.output), (True, self._files.errors)):
                self._handles[failed] = _locked(path)
                _cut_torn_line(self._handles[failed])
                self._count(path, failed=failed)
        except BaseException:
            self.close()
            raise
        return self

    def add(self, record: Record) -> None:
        """Append one line; it is the system's after `flush`."""
        assert not self.done[record.line], f"line {record.line} is done already"
        self._handles[record.failed].write(record.encoded())
        self.done[record.line] = 1
        self.tally.add(record)
        self._dirty = True

    def flush(self) -> None:
        """Hand everything to the system."""
        for handle in self._handles.values():
            handle.flush()

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        self.flush()
        if self._dirty:
            for handle in self._handles.values():
                os.fsync(handle.fileno())
            self._dirty = False

    def close(self) -> None:
        """Close and unlock, also where what is left to write cannot be written."""
        with ExitStack() as stack:
            for handle in self._handles.values():
                stack.callback(handle.close)
            self._handles = {}

    def _count(self, path: Path, *, failed: bool) -> None:
        for record in read_records(path, self._state, failed=failed):
            if self.done[record.line]:
                raise BatchError(f"{path}: line {record.line} of the input is there twice")
            self.done[record.line] = 1
            self.tally.add(record)


def read_records(path: Path, state: BatchState, *, failed: bool) -> Iterator[Record]:
    """The records of a file; one that is still being written is left out.

    Raises:
        BatchError: a line that is not this batch's.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.endswith(b"\n"):
                yield _record(raw, f"{path}:{number}", state, failed=failed)


def is_busy(files: BatchFiles) -> bool:
    """Whether a process writes to the batch now."""
    try:
        with files.output.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def count_lines(path: Path) -> int:
    """Whole lines in a file; 0 when it is not there."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(_BUFFER), b""))


def _record(raw: bytes, place: str, state: BatchState, *, failed: bool) -> Record:
    try:
        content = json.loads(raw)
        line = line_of(content["id"], state.id)
    except (ValueError, KeyError, TypeError) as error:
        raise BatchError(
            f"{place} is no line of a batch's output ({error}); was it edited?"
        ) from None
    if line is None or not 1 <= line <= state.lines:
        raise BatchError(f"{place} is of another batch than {state.id}; use another output file")
    return Record(line, failed, content)


def _locked(path: Path) -> BinaryIO:
    """The file, for appending, and nobody else's as long as this process lives."""
    handle = path.open("ab+", buffering=_BUFFER)
    for _ in range(_TRIES):  # who looks whether it is in use holds it for a moment, too
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            time.sleep(_PAUSE_S)
    handle.close()
    raise BatchBusy(f"{path} is in use: another process runs this batch; see it with `batch watch`")


def _cut_torn_line(handle: BinaryIO) -> None:
    """Drop what stands behind the last line break: a write that a kill cut short."""
    end = handle.seek(0, os.SEEK_END)
    position = end
    while position:
        begin = max(0, position - _BUFFER)
        handle.seek(begin)
        found = handle.read(position - begin).rfind(b"\n")
        if found >= 0:
            position = begin + found + 1
            break
        position = begin
    if position != end:
        handle.truncate(position)
    handle.seek(0, os.SEEK_END)
