"""What /readyz says, from what happened and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenfleet.worker.readiness import Readiness, Signs

NOW = 1000.0
WELL = Signs(
    draining=False,
    engine_ready=True,
    working_since=NOW - 500,
    last_heard=NOW - 1,
    reachable=True,
    last_script=NOW - 3,
    last_claim=NOW - 2,
    room=1,
)


def reasons(**changed: object) -> list[str]:
    signs = replace(WELL, **changed)  # type: ignore[arg-type]
    return Readiness(lambda: signs, step_limit_s=120.0, clock=lambda: NOW).reasons()


def test_a_worker_whose_engine_steps_and_whose_claims_are_answered_is_ready() -> None:
    assert reasons() == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"draining": True}, ["draining"]),
        ({"engine_ready": False}, ["the engine is starting"]),
        ({"last_heard": NOW - 61}, ["the engine has made no step for 61 s"]),
        ({"last_heard": NOW - 61, "working_since": NOW - 5}, []),
        ({"last_heard": NOW - 61, "working_since": None}, []),
        ({"reachable": False}, ["Redis is not reachable"]),
        ({"last_script": None}, ["not registered yet"]),
        ({"last_script": NOW - 16}, ["Redis has run no script of ours for 16 s"]),
        ({"last_claim": NOW - 17}, ["Redis has answered no claim for 17 s"]),
        ({"last_claim": NOW - 17, "room": 0}, []),
        ({"last_claim": NOW - 17, "draining": True}, ["draining"]),
        ({"engine_ready": False, "reachable": False}, 2),
    ],
)
def test_each_missing_sign_is_a_reason(changed: dict[str, object], expected: object) -> None:
    found = reasons(**changed)
    assert found == expected or len(found) == expected
