"""One outcome of one of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass

GOOD, WARN, BAD = "good", "warn", "bad"
"""`bad`: jobs can be lost, or are not served; `warn`: they might be."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do where something is wrong."""

    check: str
    level: str
    found: str
    advice: str = ""
