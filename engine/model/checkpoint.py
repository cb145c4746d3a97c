"""The tensors of a checkpoint directory, checked before the first one is used.

Opening compares every shard's length with its header and the headers with the index, so a missing,
short or stale file is refused before any weight is read. Each tensor can be taken once; `close`
refuses what nobody took.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import lexists
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tokenfleet.engine.errors import CheckpointError, unreadable
from tokenfleet.engine.json_files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias")  # buffers that old exports saved


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as its shard's header describes it."""

    file: Path
    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]


class Checkpoint:
    """Reads tensors as views of the mapped files; nothing is copied here.

    Use as a context manager: a clean exit is a `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._entries = _read_entries(path)
        except OSError as error:
            raise unreadable(path, error) from error
        self._taken: set[str] = set()
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def file_of(self, name: str) -> Path:
        """The shard that holds the tensor."""
        return self._entries[name].file

    def dtype_of(self, name: str) -> str | None:
        """safetensors' name of the tensor's dtype; None when there is no such tensor."""
        entry = self._entries.get(name)
        return entry.dtype if entry else None

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        return self._entries[name].shape

    def take(self, name: str, shape: Sequence[int], dtypes: Sequence[str] = _FLOATS) -> Tensor:
        """The tensor, which must have this shape and one of these dtypes. The view is valid until
        `close`; whoever keeps the values copies them."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing from the checkpoint")
        if name in self._taken:
            raise CheckpointError(f"{entry.file}: tensor {name} is used twice")
        if entry.shape != tuple(shape):
            raise CheckpointError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)},"
                f" config.json asks for {list(shape)}"
            )
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}, supported are"
                f" {', '.join(dtypes)}"
            )
        self._taken.add(name)
        return self._read(entry, name)

    def close(self) -> None:
        """Raise CheckpointError when a tensor was left over, naming up to five."""
        self._open.clear()
        left = [
            name
            for name in self._entries
            if name not in self._taken and not name.endswith(_IGNORED_SUFFIXES)
        ]
        if left:
            file = self._entries[left[0]].file
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise CheckpointError(
                f"{file}: no part of the model takes the tensor {', '.join(left[:5])}{more};"
                " config.json does not describe this checkpoint"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        self._open.clear()

    def _read(self, entry: Entry, name: str) -> Tensor:
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(entry.file, framework="pt")
            tensor: Tensor = self._open[entry.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: tensor {name}: {error}") from error
        return tensor


def _read_entries(path: Path) -> dict[str, Entry]:
    if lexists(path / INDEX):  # a link to nowhere is read too, and named
        return _indexed(path)
    if lexists(path / SINGLE):
        return _read_header(path / SINGLE)
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    if shards:
        raise CheckpointError(
            f"{path / INDEX} is missing, and it must say which of {shards} to use"
        )
    raise CheckpointError(f"{path} holds no {SINGLE} and no {INDEX}; convert the model to them")


def _indexed(path: Path) -> dict[str, Entry]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} holds no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path / INDEX}: {shard!r} for {name} is no file name")
        if not (path / shard).is_file():
            raise CheckpointError(f"{path / shard} is missing; it should hold the tensor {name}")
    entries: dict[str, Entry] = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in _read_header(path / shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{path / shard} holds the tensor {name}, {INDEX} says"
                    f" {weight_map.get(name, 'nothing of it')}: the index is stale"
                )
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            raise CheckpointError(
                f"{path / shard} does not hold the tensor {name}, which {INDEX} places there:"
                " the index is stale"
            )
    return entries


def _read_header(file: Path) -> dict[str, Entry]:
    """The entries of one shard, whose length must be exactly what its header adds up to.

    Format: 8 bytes, the header's length (little endian); the header as JSON; the tensors' bytes.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} is cut short inside its header ({size} bytes)")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(file, fields) for name, fields in header.items()}
            ends = {name: 8 + length + fields["data_offsets"][1] for name, fields in header.items()}
        except _MALFORMED as error:
            raise CheckpointError(f"{file}: its header cannot be read: {error!r}") from error
    _check_length(file, size, ends, 8 + length)
    return entries


def _entry(file: Path, fields: Mapping[str, Any]) -> Entry:
    return Entry(file, str(fields["dtype"]), tuple(int(n) for n in fields["shape"]))


def _check_length(file: Path, size: int, ends: Mapping[str, int], empty: int) -> None:
    expected = max(ends.values(), default=empty)
    if size == expected:
        return
    cut = min((end, name) for name, end in ends.items() if end > size) if size < expected else None
    detail = f"tensor {cut[1]} is cut short" if cut else "there are bytes behind its last tensor"
    raise CheckpointError(
        f"{file} has {size} bytes, its header adds up to {expected}: {detail}; fetch it again"
    )
