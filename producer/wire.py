"""How records become bytes: msgpack maps with the schema version under `v`, no extension types.

Fields at their default are not written, so that a record is small and a new optional field costs
nothing. A field that the reader does not know is refused: it may change what the record means.

Invariant: bytes that `pack` did not write raise UndecodableJob, and nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgpack

from tokenfleet.producer.errors import InvalidJob, UndecodableJob

SCHEMA_VERSION = 1
"""Raised when a reader of the old version would misunderstand the new one."""

Record = TypeVar("Record")


def wire_of(record: Any, but: str = "") -> dict[str, Any]:
    """The fields of a record that differ from their defaults, but one."""
    names, values_of, defaults = _layout(type(record))
    return {
        name: value
        for name, value, default in zip(names, values_of(record), defaults)
        if value is not default and name != but and value != default
    }


def pack(wire: dict[str, Any]) -> bytes:
    """The map as bytes. Raises InvalidJob for values that msgpack does not have."""
    try:
        return write({"v": SCHEMA_VERSION, **wire})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidJob(
            "job", str(error), "must hold only texts, numbers, lists and mappings"
        ) from error


def unpack(packed: bytes, what: str) -> dict[str, Any]:
    """Back from `pack`, without the version. `what` names the record in errors."""
    try:
        wire = msgpack.unpackb(packed, strict_map_key=False, ext_hook=_no_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        why = str(error) or type(error).__name__
        raise UndecodableJob(what, packed[:40], f"must be msgpack ({why})") from error
    if not isinstance(wire, dict):
        raise UndecodableJob(what, wire, "must be a map")
    version = wire.pop("v", None)
    if version != SCHEMA_VERSION:
        raise UndecodableJob(
            f"{what}.v", version, f"must be {SCHEMA_VERSION}, the schema version known here"
        )
    return wire


def build(kind: type[Record], wire: dict[str, Any], what: str) -> Record:
    """The record of `wire`. Raises UndecodableJob for unknown or missing fields."""
    known = _known(kind)  # type: ignore[arg-type]  # mypy takes no generic class for hashable
    if not wire.keys() <= known:
        unknown = wire.keys() - known
        raise UndecodableJob(what, sorted(map(str, unknown)), "must hold only known fields")
    try:
        return kind(**wire)
    except (InvalidJob, TypeError, ValueError, AttributeError) as error:
        raise undecodable(what, error) from error


def undecodable(what: str, error: Exception) -> UndecodableJob:
    """What to raise for an error met in making a record of its values."""
    if isinstance(error, InvalidJob):
        return UndecodableJob(error.field, error.value, error.way_out)
    return UndecodableJob(what, str(error), f"must hold the fields of a {what}")


def _as_map(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _no_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {code}")


_packer = msgpack.Packer(default=_as_map)
_lock = threading.Lock()


def _unlocked() -> None:
    """A forked child must not wait for a thread that only its parent has."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlocked)


def write(wire: dict[str, Any]) -> bytes:
    """The map as it is. One packer for all: to make one costs more than to pack an event."""
    with _lock:  # a packer is not thread-safe
        packed: bytes = _packer.pack(wire)
        return packed


write_plain: Callable[[dict[str, Any]], bytes] = msgpack.Packer().pack
"""The same for texts, integers and lists of them only: cheaper, and it is done for each event.

Packing them runs no Python code, so one call ends before another thread's begins.
"""

write_for_script: Callable[[list[Any]], bytes] = msgpack.Packer(use_bin_type=False).pack
"""Plain values for a script to unpack. cmsgpack knows no bin type: bytes go as texts do."""


Layout = tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]], tuple[Any, ...]]
_layouts: dict[type, Layout] = {}


def _layout(kind: type) -> Layout:
    """A dataclass's field names, a getter of all of them, and the defaults."""
    if kind not in _layouts:
        specs = fields(kind)
        names = tuple(spec.name for spec in specs)
        defaults = tuple(
            spec.default if spec.default_factory is MISSING else spec.default_factory()
            for spec in specs
        )
        _layouts[kind] = (names, attrgetter(*names), defaults)
    return _layouts[kind]


@cache
def _known(kind: type) -> frozenset[str]:
    """A dataclass's field names."""
    return frozenset(_layout(kind)[0])
