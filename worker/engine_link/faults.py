"""Faults on purpose, for tests: the engine process dies, hangs or raises at a named point.

A fault is written `action@point:count`, e.g. `kill@step:7` or `kill@add:66,6f`: with a number the
point's n-th visit triggers it, with a word the visit whose subject contains it. `raise` with the
name of an engine error raises that. Several are joined by `;`; without the setting none is there.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from tokenfleet.engine import errors

ACTIONS = ("kill", "hang", "raise")
POINTS = ("start", "add", "step", "sent")


@dataclass(slots=True)
class _Fault:
    action: str
    point: str
    trigger: str
    visits: int = 0


class Faults:
    """The faults that one process is to suffer.

    Raises:
        ValueError: a fault that cannot be read, with the form that can.
    """

    def __init__(self, spec: str | None) -> None:
        self._faults = [_parse(part) for part in spec.split(";")] if spec else []

    def __bool__(self) -> bool:
        return bool(self._faults)

    def visit(self, point: str, subject: str = "") -> None:
        """Suffer whatever was asked for at this point."""
        for fault in self._faults:
            if fault.point != point:
                continue
            fault.visits += 1
            due = (
                fault.visits == int(fault.trigger)
                if fault.trigger.isdigit()
                else fault.trigger in subject or hasattr(errors, fault.trigger)
            )
            if due:
                _suffer(fault)


def _parse(part: str) -> _Fault:
    action, _, rest = part.strip().partition("@")
    point, _, trigger = rest.partition(":")
    if action not in ACTIONS or point not in POINTS or not trigger:
        raise ValueError(
            f"fault must be <one of {ACTIONS}>@<one of {POINTS}>:<count or word>, got {part!r}"
        )
    return _Fault(action, point, trigger)


def _suffer(fault: _Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "raise":
        kind = getattr(errors, fault.trigger, RuntimeError)
        raise kind(f"fault injected at {fault.point}:{fault.trigger}")
    while True:
        signal.pause()
