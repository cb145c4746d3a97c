"""What a worker says of itself in the worker table."""

from __future__ import annotations

from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.presence import Pace


class Engine:
    """The figures and the time that a Pace sees."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stats = StepStats()
        self.pace = Pace(lambda: self.stats, lambda: self.now)

    def after(self, seconds: float, tokens: int) -> dict[str, float]:
        self.now += seconds
        self.stats = StepStats(decode_tokens_total=self.stats.decode_tokens_total + tokens)
        return self.pace.figures()


def test_tokens_are_counted_from_one_look_to_the_next() -> None:
    engine = Engine()
    assert engine.after(1.0, 0) == {}, "nothing to compare with yet"
    assert engine.after(4.0, 100) == {"tokens_per_s": 25.0}
    assert engine.after(2.0, 0) == {"tokens_per_s": 0.0}


def test_an_engine_that_was_started_anew_counts_from_zero() -> None:
    engine = Engine()
    engine.after(1.0, 1000)
    engine.stats = StepStats()
    assert engine.after(2.0, 30) == {"tokens_per_s": 15.0}


def test_kv_usage_is_said_where_there_are_blocks() -> None:
    engine = Engine()
    engine.stats = StepStats(blocks_used=1, blocks_total=3)
    assert engine.pace.figures() == {"kv_usage": 0.3333}
