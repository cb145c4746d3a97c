"""What is said of a Redis that is away."""

from __future__ import annotations

import pytest
import structlog
from redis.exceptions import ConnectionError, ResponseError

from tokenfleet.worker import broker as broker_module
from tokenfleet.worker.broker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Broker,
    blames_request,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_outage_is_one_line_at_each_end_however_many_loops_meet_it() -> None:
    clock = Clock()
    broker = Broker(clock)
    with structlog.testing.capture_logs() as lines:
        for call in ("emit", "claim", "renew"):
            broker.away(call, ConnectionError("refused"))
            assert not broker.reachable
        clock.now = 2.5
        broker.reached()
        broker.reached()
    assert broker.reachable
    assert [(x["event"], x.get("call"), x.get("away_s")) for x in lines] == [
        ("broker_away", "emit", None),
        ("broker_back", None, 2.5),
    ]


def test_one_call_that_fails_for_ever_is_said_once_a_minute() -> None:
    clock = Clock()
    broker = Broker(clock)
    with structlog.testing.capture_logs() as lines:
        for second in range(121):
            clock.now = float(second)
            broker.away("claim", ConnectionError("no permission"))
            broker.reached()
    assert len(lines) == 2 * 3
    with structlog.testing.capture_logs() as lines:
        broker.away("claim", ConnectionError("another reason"))
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (ResponseError("WRONGTYPE Operation against a key"), True),
        (ResponseError("ERR something script: abc"), True),
        (ResponseError("MISCONF Redis is configured to save"), False),
        (ResponseError("NOREPLICAS Not enough good replicas"), False),
        (ResponseError("Attempted to access a non local key in a cluster node script: x"), False),
        (ResponseError("Script attempted to access a non local key in a cluster node"), False),
        (ConnectionError("refused"), False),
        (OSError("unreachable"), False),
    ],
)
def test_a_refused_call_is_told_from_a_server_in_trouble(error: Exception, blames: bool) -> None:
    assert blames_request(error) is blames


async def test_after_an_outage_of_any_length_the_next_try_comes_within_the_longest_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(broker_module.asyncio, "sleep", sleep)
    broker = Broker()
    for _ in range(50):
        broker.away("claim", ConnectionError("refused"))
        await broker.pause()
    assert max(pauses) <= LONGEST_PAUSE_S
    assert pauses[0] <= FIRST_PAUSE_S, "a short outage is over soon"
    broker.reached()
    await broker.pause()
    assert pauses[-1] <= FIRST_PAUSE_S, "the next outage starts from the beginning"


def test_a_part_of_a_cluster_that_is_away_is_not_all_of_it_until_nothing_gets_through() -> None:
    clock = Clock()
    whole, parts = Broker(clock), Broker(clock, several=True)
    refused = ConnectionError("refused")
    parts.away("claim", refused)
    assert not parts.reachable, "nothing has got through yet"
    seen = []
    for second in range(40):
        clock.now = float(second)
        for broker in (whole, parts):
            if second < 20 and second % 5 == 0:
                broker.reached()
            broker.away("heartbeat", refused)
        seen.append((whole.reachable, parts.reachable))
    assert not any(reachable for reachable, _ in seen)
    last = 15 + int(broker_module.PART_AWAY_S)
    assert [reachable for _, reachable in seen] == [second < last for second in range(40)]
