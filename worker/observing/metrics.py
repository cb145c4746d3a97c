"""The worker's instruments, and the one place where a figure becomes a metric.

Labels are the model, the operation, a job's end state and an error's code: few values each, never a
job or a tenant. Counters follow totals that the engine reports, and survive its restart: a total
that went down began again at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Counter, Meter, Observation

from tokenfleet.engine.stats import StepStats
from tokenfleet.producer import semconv

LATENCY_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
PER_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
STEP_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
    10.0,
)  # fmt: skip

_TOTALS = {
    semconv.STEPS: ("step", "Steps of the engine."),
    semconv.PREFILL_TOKENS: ("prefill_tokens_total", "Prompt and recomputed tokens computed."),
    semconv.DECODE_TOKENS: ("decode_tokens_total", "Output tokens computed."),
    semconv.PREEMPTIONS: ("preemptions_total", "Sequences whose blocks were taken back."),
    semconv.PREFIX_CACHE_QUERIES: ("cache_queries_total", "Tokens looked up in the prefix cache."),
    semconv.PREFIX_CACHE_HITS: ("cache_hits_total", "Tokens found in the prefix cache."),
}
_GAUGES = {
    semconv.SEQUENCES_RUNNING: ("running", "Sequences in the batch."),
    semconv.SEQUENCES_WAITING: ("waiting", "Sequences claimed and not yet in the batch."),
    semconv.BLOCKS_USED: ("blocks_used", "KV blocks that a sequence holds."),
    semconv.BLOCKS_CACHED: ("blocks_cached", "Free KV blocks that still hold a known prefix."),
    semconv.BLOCKS: ("blocks_total", "KV blocks of the pool."),
}


class Instruments:
    """Creates every instrument once; methods are the facts that happen to a worker."""

    def __init__(self, meter: Meter, model: str, token_budget: int) -> None:
        self._labels = {"model": model}
        self._budget = max(1, token_budget)
        self._last = StepStats()
        self._jobs_running = 0
        self._totals: dict[str, int] = {}
        self._counters: dict[str, Counter] = {
            name: meter.create_counter(name, description=text)
            for name, (_, text) in _TOTALS.items()
        }
        for name, (field, text) in _GAUGES.items():
            meter.create_observable_gauge(name, [self._reader(field)], description=text)
        meter.create_observable_gauge(
            semconv.KV_CACHE_USAGE, [self._kv_usage], description="Share of the KV blocks in use."
        )
        meter.create_observable_gauge(
            semconv.TOKEN_BUDGET_USAGE,
            [self._budget_usage],
            description="Share of the token budget that the last step used.",
        )
        meter.create_observable_gauge(
            semconv.JOBS_RUNNING, [self._running_jobs], description="Jobs that this worker holds."
        )
        self._make_job_instruments(meter)

    def _make_job_instruments(self, meter: Meter) -> None:
        self._claimed = meter.create_counter(
            semconv.JOBS_CLAIMED, description="Jobs taken under a lease."
        )
        self._resumed = meter.create_counter(
            semconv.JOBS_RESUMED, description="Jobs that went on from an earlier attempt's tokens."
        )
        self._ended = meter.create_counter(
            semconv.JOBS_ENDED,
            description="Jobs that left this worker, by state; released and lost ones go on.",
        )
        self._restarts = meter.create_counter(
            semconv.ENGINE_RESTARTS, description="Times the engine process was started again."
        )
        self._queue_wait = meter.create_histogram(
            semconv.QUEUE_WAIT,
            description="From submission to the first claim.",
            explicit_bucket_boundaries_advisory=LATENCY_BUCKETS_S,
        )
        self._first_token = meter.create_histogram(
            semconv.TIME_TO_FIRST_TOKEN,
            unit="s",
            description="From submission to the first output token.",
            explicit_bucket_boundaries_advisory=LATENCY_BUCKETS_S,
        )
        self._per_token = meter.create_histogram(
            semconv.TIME_PER_OUTPUT_TOKEN,
            unit="s",
            description="Mean time between the output tokens of a job after its first.",
            explicit_bucket_boundaries_advisory=PER_TOKEN_BUCKETS_S,
        )
        self._duration = meter.create_histogram(
            semconv.REQUEST_DURATION,
            unit="s",
            description="From submission to the end of the job.",
            explicit_bucket_boundaries_advisory=LATENCY_BUCKETS_S,
        )
        self._step = meter.create_histogram(
            semconv.STEP_DURATION,
            description="Wall time of an engine step.",
            explicit_bucket_boundaries_advisory=STEP_BUCKETS_S,
        )
        self._flush = meter.create_histogram(
            semconv.FLUSH_DURATION,
            description="Round trip that publishes the new tokens of all running jobs.",
            explicit_bucket_boundaries_advisory=STEP_BUCKETS_S,
        )

    def claimed(self, wait_s: float, *, resumed: bool) -> None:
        self._jobs_running += 1
        self._claimed.add(1, self._labels)
        if resumed:
            self._resumed.add(1, self._labels)
        else:
            self._queue_wait.record(max(0.0, wait_s), self._labels)

    def first_token(self, seconds: float, labels: Mapping[str, str]) -> None:
        self._first_token.record(seconds, labels)

    def left(self, state: str) -> None:
        self._jobs_running -= 1
        self._ended.add(1, {**self._labels, "state": state})

    def ended(self, seconds: float, labels: Mapping[str, str]) -> None:
        self._duration.record(seconds, labels)

    def token_pace(self, seconds_per_token: float, labels: Mapping[str, str]) -> None:
        self._per_token.record(seconds_per_token, labels)

    def step(self, stats: StepStats) -> None:
        self._last = stats
        self._step.record(stats.step_s, self._labels)
        for name, (field, _) in _TOTALS.items():
            total, before = getattr(stats, field), self._totals.get(name, 0)
            grown = total - before if total >= before else total
            if grown:
                self._counters[name].add(grown, self._labels)
            self._totals[name] = total

    def engine_restarted(self) -> None:
        self._restarts.add(1, self._labels)

    def flushed(self, seconds: float) -> None:
        self._flush.record(seconds, self._labels)

    def _reader(self, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(getattr(self._last, field), self._labels)]

        return read

    def _kv_usage(self, _: CallbackOptions) -> Iterable[Observation]:
        share = self._last.blocks_used / max(1, self._last.blocks_total)
        return [Observation(share, self._labels)]

    def _budget_usage(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(self._last.scheduled_tokens / self._budget, self._labels)]

    def _running_jobs(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(self._jobs_running, self._labels)]
