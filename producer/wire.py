"""How records become bytes: msgpack maps with the schema version under `v`, no extension types.

Fields at their default are not written, so that a record is small and a new optional field costs
nothing. A field that the reader does not know is refused: it may change what the record means.

Invariant: bytes that `pack` did not write raise UndecodableJob, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

import msgpack

from tokenfleet.producer.errors import InvalidJob, UndecodableJob

SCHEMA_VERSION = 1
"""Raised when a reader of the old version would misunderstand the new one."""

Record = TypeVar("Record")


def wire_of(record: Any) -> dict[str, Any]:
    """The fields of a record that differ from their defaults."""
    wire: dict[str, Any] = {}
    for name, default in _defaults(type(record)):
        value = getattr(record, name)
        if value is not default and value != default:
            wire[name] = value.to_wire() if hasattr(value, "to_wire") else value
    return wire


def pack(wire: dict[str, Any]) -> bytes:
    """The map as bytes. Raises InvalidJob for values that msgpack does not have."""
    try:
        return bytes(msgpack.packb({"v": SCHEMA_VERSION, **wire}, default=_as_map))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidJob(
            "job", str(error), "must hold only texts, numbers, lists and mappings"
        ) from error


def unpack(packed: bytes, what: str) -> dict[str, Any]:
    """Back from `pack`, without the version. `what` names the record in errors."""
    try:
        wire = msgpack.unpackb(packed, strict_map_key=False, ext_hook=_no_extension)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise UndecodableJob(what, packed[:40], f"must be msgpack ({error})") from error
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
    unknown = wire.keys() - {name for name, _ in _defaults(kind)}
    if unknown:
        raise UndecodableJob(what, sorted(map(str, unknown)), "must hold only known fields")
    try:
        return kind(**wire)
    except InvalidJob as error:
        raise UndecodableJob(error.field, error.value, error.way_out) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UndecodableJob(what, str(error), f"must hold the fields of a {what}") from error


def _as_map(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _no_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {code}")


_known: dict[type, tuple[tuple[str, Any], ...]] = {}


def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of a dataclass, worked out on first use."""
    if kind not in _known:
        _known[kind] = tuple(
            (spec.name, spec.default if spec.default_factory is MISSING else spec.default_factory())
            for spec in fields(kind)
        )
    return _known[kind]
