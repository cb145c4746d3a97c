"""What makes a value acceptable, wherever a caller hands one in.

Invariant: a check either returns or raises InvalidJob with the field's name; no value is changed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from tokenfleet.producer.errors import InvalidJob

MOST_S = 10 * 365 * 86400.0
"""Ten years: as milliseconds by any clock it is a number that Redis takes."""

_MOST_NESTED = 200
_ATOMS = (str, int, float, bool, bytes, type(None))


def is_int(value: object) -> bool:
    """An integer, and not a bool in disguise."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """An integer or float that is finite, as a float too."""
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    except OverflowError:  # an integer beyond all floats
        return False


def is_text(value: object) -> bool:
    """A text that has bytes: no half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def are_token_ids(values: Collection[Any]) -> bool:
    """Integers of 0 or more that fit a vocabulary; there is at least one."""
    plain = set(map(type, values)) == {int}  # each prompt is looked at, and nearly all are that
    return (plain or all(map(is_int, values))) and min(values) >= 0 and max(values) < 2**31


def check_seconds(field: str, value: object) -> float:
    """A time that may be waited for."""
    if not is_number(value) or not value > 0:  # type: ignore[operator]  # it is a number
        raise InvalidJob(field, value, "must be seconds, more than 0")
    return value  # type: ignore[return-value]  # the same


def check_ttl(field: str, value: object) -> float:
    """How long Redis is to keep something."""
    if not is_number(value) or not 0.001 <= value <= MOST_S:  # type: ignore[operator]  # the same
        raise InvalidJob(field, value, "must be seconds, 0.001 or more and at most ten years")
    return value  # type: ignore[return-value]  # the same


def check_count(field: str, value: object, most: int) -> int:
    """How many of something there are to be."""
    if not is_int(value) or not 1 <= value <= most:  # type: ignore[operator]  # it is one
        raise InvalidJob(field, value, f"must be a whole number from 1 to {most}")
    return value  # type: ignore[return-value]  # the same


def check_plain(field: str, value: object, at: str = "", depth: int = 0) -> None:
    """Texts, numbers, lists and mappings: what arrives at a worker as it was sent.

    The place of what is not is said, and not its text: it may be a prompt's.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, _ATOMS):
                raise InvalidJob(field, key, f"must have texts or numbers as keys{_place(at)}")
            check_plain(field, key, at, depth + 1)
            check_plain(field, item, f"{at}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_plain(field, item, f"{at}[{number}]", depth + 1)
    elif isinstance(value, str):
        if not is_text(value):
            raise InvalidJob(
                field,
                f"{len(value)} characters",
                f"must hold whole characters: half a surrogate pair has no bytes{_place(at)}",
            )
    elif not isinstance(value, _ATOMS):
        raise InvalidJob(
            field, value, f"must hold only texts, numbers, lists and mappings{_place(at)}"
        )
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidJob(field, value, f"must hold only integers of 64 bits{_place(at)}")
    if depth > _MOST_NESTED:
        raise InvalidJob(field, f"{depth} levels", f"must not be nested more than {_MOST_NESTED}")


def _place(at: str) -> str:
    return f" (at {at[:80]})" if at else ""
