"""Which instruments a worker has: name, kind, what it says, and where its figure comes from.

Each is made once, here and in metrics.py; ops/telemetry.md lists them for people (a test compares).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from tokenfleet.producer import semconv

LATENCY_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 160.0, 320.0, 640.0, 2560.0,
)  # fmt: skip
PER_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
STEP_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
    10.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0,
    262144.0,
)  # fmt: skip

TOTALS = {
    semconv.STEPS: ("step", "Steps of the engine."),
    semconv.PREFILL_TOKENS: ("prefill_tokens_total", "Prompt and recomputed tokens computed."),
    semconv.DECODE_TOKENS: ("decode_tokens_total", "Output tokens computed."),
    semconv.PREEMPTIONS: ("preemptions_total", "Sequences whose blocks were taken back."),
    semconv.PREFIX_CACHE_QUERIES: ("cache_queries_total", "Tokens looked up in the prefix cache."),
    semconv.PREFIX_CACHE_HITS: ("cache_hits_total", "Tokens found in the prefix cache."),
    semconv.READ_BYTES: ("read_bytes_total", "Weights and KV that the steps had to read."),
    semconv.SEQUENCE_ERRORS: ("errors_total", "Sequences that the engine ended with an error."),
    semconv.OOM_RETRIES: ("oom_retries_total", "Steps tried again smaller, out of memory."),
}
"""Counters that follow a total of the engine's: its name in StepStats."""

PHASES = {
    "schedule": "schedule_s_total",
    "forward": "forward_s_total",
    "sample": "sample_s_total",
}
"""Parts of a step, by their totals in StepStats; what is left of it is the phase `other`."""

GAUGES = {
    semconv.SEQUENCES_RUNNING: ("running", "Sequences in the batch."),
    semconv.SEQUENCES_WAITING: ("waiting", "Sequences claimed and not yet in the batch."),
    semconv.BLOCKS_USED: ("blocks_used", "KV blocks that a sequence holds."),
    semconv.BLOCKS_CACHED: ("blocks_cached", "Free KV blocks that still hold a known prefix."),
    semconv.BLOCKS_NEEDED: (
        "blocks_needed",
        "KV blocks that the tokens present would fill, nothing shared.",
    ),
    semconv.BLOCKS: ("blocks_total", "KV blocks of the pool."),
}
"""Gauges that show a field of the latest StepStats."""


MOST_GATHERED = 64


class Tally:
    """A counter that is added to in a microsecond and read when somebody looks.

    The SDK's own takes ten.

    Args:
        settle: called before each look: adds what has not been added yet.
    """

    def __init__(self, meter: Meter, name: str, text: str, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._sums: dict[tuple[tuple[str, str], ...], float] = {}
        meter.create_observable_counter(name, [self._read], description=text)

    def add(self, amount: float, labels: Mapping[str, str]) -> None:
        """Adding 0 shows a counter of something that has not happened yet."""
        key = tuple(labels.items())
        self._sums[key] = self._sums.get(key, 0) + amount

    def _read(self, _: CallbackOptions) -> Iterable[Observation]:
        self._settle()
        found = list(self._sums.items())  # at once: an exporter reads in a thread of its own
        return [Observation(value, dict(key)) for key, value in found]


class Gathered:
    """Values of a histogram on their way to it: those of each step, recorded many in a row.

    One record between other work finds nothing of the SDK in the caches and takes three times as
    long as one in a row. Whoever collects asks for `hand_over` first, so nothing is ever late.
    """

    def __init__(self, histogram: Histogram, labels: Mapping[str, str]) -> None:
        self._histogram = histogram
        self._labels = labels
        self._values: deque[float] = deque()

    def record(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) >= MOST_GATHERED:
            self.hand_over()

    def hand_over(self) -> None:
        """Record what waits. Exporters collect in threads of their own: each value leaves once."""
        with suppress(IndexError):
            while True:
                self._histogram.record(self._values.popleft(), self._labels)


@dataclass(frozen=True, slots=True)
class Histograms:
    """Every histogram; seconds where the name does not say tokens."""

    queue_wait: Histogram
    first_token: Histogram
    per_token: Histogram
    duration: Histogram
    step: Histogram
    flush: Histogram
    prompt_tokens: Histogram
    output_tokens: Histogram

    @classmethod
    def create(cls, meter: Meter) -> Histograms:
        def of(name: str, text: str, buckets: tuple[float, ...], unit: str = "") -> Histogram:
            return meter.create_histogram(
                name, unit=unit, description=text, explicit_bucket_boundaries_advisory=buckets
            )

        return cls(
            queue_wait=of(
                semconv.QUEUE_WAIT, "From submission to the first claim.", LATENCY_BUCKETS_S
            ),
            first_token=of(
                semconv.TIME_TO_FIRST_TOKEN,
                "From submission to the first output token.",
                LATENCY_BUCKETS_S,
                "s",
            ),
            per_token=of(
                semconv.TIME_PER_OUTPUT_TOKEN,
                "Mean time between the output tokens of a job after its first.",
                PER_TOKEN_BUCKETS_S,
                "s",
            ),
            duration=of(
                semconv.REQUEST_DURATION,
                "From submission to the end of the job.",
                LATENCY_BUCKETS_S,
                "s",
            ),
            step=of(semconv.STEP_DURATION, "Wall time of an engine step.", STEP_BUCKETS_S),
            flush=of(
                semconv.FLUSH_DURATION,
                "Round trip that publishes the new tokens of all running jobs.",
                STEP_BUCKETS_S,
            ),
            prompt_tokens=of(
                semconv.JOB_PROMPT_TOKENS, "Prompt tokens of jobs with a result.", TOKEN_BUCKETS
            ),
            output_tokens=of(
                semconv.JOB_OUTPUT_TOKENS,
                "Output tokens of jobs with a result, all attempts and choices.",
                TOKEN_BUCKETS,
            ),
        )
