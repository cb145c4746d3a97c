"""Reading a JSONL file line by line, from any line on, with its digest on request.

Invariant: never more than one line, and never more than the longest allowed, is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line as it stands in the file, without its end."""

    number: int
    """From 1."""
    offset: int
    """Where it begins, in bytes."""
    raw: bytes
    """Empty when the line is too long."""
    size: int
    """Bytes, the line's end included."""
    crlf: bool = False
    bom: bool = False
    too_long: bool = False


def read_lines(
    path: Path, *, max_line_bytes: int, on_bytes: Callable[[bytes], object] | None = None
) -> Iterator[RawLine]:
    """Every line in order. `on_bytes` sees the whole file, piece by piece."""
    with path.open("rb", buffering=_BUFFER) as file:
        number = offset = 0
        while piece := file.readline(max_line_bytes + 2):
            number += 1
            if on_bytes is not None:
                on_bytes(piece)
            size = len(piece)
            too_long = len(piece.removesuffix(b"\n").removesuffix(b"\r")) > max_line_bytes
            if too_long and not piece.endswith(b"\n"):
                size += _skip_rest(file, on_bytes)
            yield _line(number, offset, piece, size, too_long=too_long)
            offset += size


def line_at(path: Path, number: int, offset: int, *, max_line_bytes: int) -> RawLine:
    """One line again, whose place is known."""
    with path.open("rb") as file:
        file.seek(offset)
        piece = file.readline(max_line_bytes + 2)
    return _line(number, offset, piece, len(piece), too_long=False)


def _skip_rest(file: BinaryIO, on_bytes: Callable[[bytes], object] | None) -> int:
    """Read on to the end of the line; how many bytes that were."""
    skipped = 0
    while piece := file.readline(_BUFFER):
        skipped += len(piece)
        if on_bytes is not None:
            on_bytes(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _line(number: int, offset: int, piece: bytes, size: int, *, too_long: bool) -> RawLine:
    raw = piece.removesuffix(b"\n")
    crlf = raw.endswith(b"\r")
    raw = raw.removesuffix(b"\r")
    bom = number == 1 and raw.startswith(BOM)
    raw = raw.removeprefix(BOM) if bom else raw
    return RawLine(number, offset, b"" if too_long else raw, size, crlf, bom, too_long)
