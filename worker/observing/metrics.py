"""The worker's instruments at work: the one place where a figure becomes a metric.

Labels are the model, the operation, a job's class, its end state and an error's code: few values
each, never a job or a tenant. Counters follow totals that the engine reports, and survive its
restart: a total that went down began again at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from tokenfleet.engine.stats import StepStats
from tokenfleet.producer import semconv
from tokenfleet.worker.observing.instruments import (
    GAUGES,
    PHASES,
    TOTALS,
    Gathered,
    Histograms,
    Tally,
)

LEFT_AS = ("finished", "failed", "cancelled", "expired", "released", "lost")
"""States in which a job leaves a worker."""

Reading = Callable[[CallbackOptions], Iterable[Observation]]


@dataclass(frozen=True, slots=True)
class About:
    """What a worker's metrics say about it for as long as it lives."""

    model: str
    token_budget: int
    slots: int = 0
    worker_id: str = ""
    version: str = ""


class Instruments:
    """Creates every instrument once; methods are the facts that happen to a worker.

    `context`, where one is taken, holds the span of the job: it gives the figure its exemplar.
    """

    def __init__(self, meter: Meter, about: About) -> None:
        self._labels = {semconv.MODEL: about.model}
        self._about = about
        self._last = StepStats()
        self._jobs_running = 0
        self._totals: dict[str, float] = {}
        self._settled = self._last
        """Of which step the totals are in the counters."""
        self._settling = Lock()
        self._queued: Mapping[str, int] = {}
        self._paused: frozenset[str] = frozenset()
        self._dead: int | None = None
        self._ready: Callable[[], bool] | None = None
        self._broker: Callable[[], bool] | None = None
        self._histograms = Histograms.create(meter)
        self._steps = Gathered(self._histograms.step, self._labels)
        self._flushes = Gathered(self._histograms.flush, self._labels)
        self._counters = {
            name: Tally(meter, name, text, self._settle) for name, (_, text) in TOTALS.items()
        }
        self._make_counters(meter)
        self._make_gauges(meter)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Show counters of rare events before the first: Prometheus sees only what grows."""
        for name in TOTALS:
            self._counters[name].add(0, self._labels)
        for counter in (self._claimed, self._resumed, self._reclaimed, self._restarts):
            counter.add(0, self._labels)
        for state in LEFT_AS:
            self._ended.add(0, {**self._labels, semconv.STATE: state})

    def _make_counters(self, meter: Meter) -> None:
        def counter(name: str, text: str) -> Tally:
            return Tally(meter, name, text, self._settle)

        self._claimed = counter(semconv.JOBS_CLAIMED, "Jobs taken under a lease.")
        self._resumed = counter(
            semconv.JOBS_RESUMED, "Jobs that went on from an earlier attempt's tokens."
        )
        self._ended = counter(
            semconv.JOBS_ENDED,
            "Jobs that left this worker, by state; released and lost ones go on.",
        )
        self._choices = counter(semconv.CHOICES_ENDED, "Choices of ended jobs, by why they ended.")
        self._reclaimed = counter(
            semconv.JOBS_RECLAIMED, "Jobs whose lease was over, moved on by this worker."
        )
        self._restarts = counter(
            semconv.ENGINE_RESTARTS, "Times the engine process was started again."
        )
        self._phases = counter(semconv.STEP_PHASE, "Seconds of the engine's steps, by phase.")

    def _make_gauges(self, meter: Meter) -> None:
        def gauge(name: str, reading: Reading, text: str) -> None:
            meter.create_observable_gauge(name, [reading], description=text)

        for name, (field, text) in GAUGES.items():
            gauge(name, self._stat(field), text)
        gauge(semconv.KV_CACHE_USAGE, self._of(self._kv_usage), "Share of the KV blocks in use.")
        gauge(
            semconv.TOKEN_BUDGET_USAGE,
            self._of(self._budget_usage),
            "Share of the token budget that the last step used.",
        )
        gauge(
            semconv.TOKEN_BUDGET,
            self._of(lambda: self._about.token_budget),
            "Most tokens that one step may compute.",
        )
        gauge(
            semconv.JOBS_RUNNING,
            self._of(lambda: self._jobs_running),
            "Jobs that this worker holds.",
        )
        gauge(
            semconv.SLOTS,
            self._of(lambda: self._about.slots),
            "Sequences that this worker runs at most.",
        )
        gauge(semconv.READY, self._state("_ready"), "1 while this worker would take a job.")
        gauge(semconv.BROKER_REACHABLE, self._state("_broker"), "1 while Redis answers.")
        gauge(
            semconv.QUEUE_JOBS,
            self._read_queue,
            "Jobs of the model that wait in Redis, by priority; every worker says the same.",
        )
        gauge(
            semconv.QUEUE_PAUSED,
            self._read_paused,
            "1 while nobody claims from this queue; every worker says the same.",
        )
        gauge(
            semconv.DEAD_LETTERS,
            self._read_dead,
            "Dead letters in Redis, of all models; every worker says the same.",
        )
        gauge(semconv.WORKER_INFO, self._read_info, "1, with what the worker is.")

    # a job's life

    def claimed(
        self, wait_s: float, priority: str, *, resumed: bool, context: Context | None = None
    ) -> None:
        self._jobs_running += 1
        self._claimed.add(1, self._labels)
        if resumed:
            self._resumed.add(1, self._labels)
        else:
            labels = {**self._labels, semconv.PRIORITY: priority}
            self._histograms.queue_wait.record(max(0.0, wait_s), labels, context)

    def first_token(
        self, seconds: float, labels: Mapping[str, str], context: Context | None = None
    ) -> None:
        self._histograms.first_token.record(seconds, labels, context)

    def left(self, state: str) -> None:
        self._jobs_running -= 1
        self._ended.add(1, {**self._labels, semconv.STATE: state})

    def ended(
        self, seconds: float, labels: Mapping[str, str], context: Context | None = None
    ) -> None:
        self._histograms.duration.record(seconds, labels, context)

    def result(self, prompt_tokens: int, output_tokens: int, finish_reasons: Iterable[str]) -> None:
        self._histograms.prompt_tokens.record(prompt_tokens, self._labels)
        self._histograms.output_tokens.record(output_tokens, self._labels)
        for reason in finish_reasons:
            self._choices.add(1, {**self._labels, semconv.FINISH_REASON: reason})

    def token_pace(
        self, seconds_per_token: float, labels: Mapping[str, str], context: Context | None = None
    ) -> None:
        self._histograms.per_token.record(seconds_per_token, labels, context)

    # the engine

    @property
    def last_step(self) -> StepStats:
        """What the engine last said; all zero before its first step."""
        return self._last

    def step(self, stats: StepStats) -> None:
        """Keeps what the step says; its totals become counters when somebody looks."""
        if stats.step < self._last.step:
            self._begin_again()
        self._last = stats
        self._steps.record(stats.step_s)

    def _begin_again(self) -> None:
        """Another engine's totals follow."""
        self._settle()
        self._totals.clear()

    def _settle(self) -> None:
        """Add to the counters what the totals have gained. Exporters look in threads of their
        own."""
        with self._settling:
            if self._settled is not self._last:
                self._settled = self._last
                self._count(self._last)

    def _count(self, stats: StepStats) -> None:
        for name, (field, _) in TOTALS.items():
            if grown := self._grown(name, getattr(stats, field)):
                self._counters[name].add(grown, self._labels)
        rest = self._grown("other", stats.step_s_total)
        for phase, field in PHASES.items():
            if spent := self._grown(phase, getattr(stats, field)):
                rest -= spent
                self._phases.add(spent, {**self._labels, semconv.PHASE: phase})
        if rest > 0:
            self._phases.add(rest, {**self._labels, semconv.PHASE: "other"})

    def _grown(self, name: str, total: float) -> float:
        """What a total gained since it was last seen; all of it when it began again."""
        before, self._totals[name] = self._totals.get(name, 0), total
        return total - before if total >= before else total

    def engine_restarted(self) -> None:
        self._begin_again()
        self._restarts.add(1, self._labels)

    def flushed(self, seconds: float) -> None:
        self._flushes.record(seconds)

    # the worker and its surroundings

    def watch(self, *, ready: Callable[[], bool], broker: Callable[[], bool]) -> None:
        self._ready, self._broker = ready, broker

    def reclaimed(self, jobs: int) -> None:
        self._reclaimed.add(jobs, self._labels)

    def queue_seen(
        self, waiting: Mapping[str, int], paused: Iterable[str], dead_letters: int
    ) -> None:
        """The model's queues by priority, which of them are paused, and dead letters."""
        self._queued, self._paused, self._dead = dict(waiting), frozenset(paused), dead_letters

    def queue_unseen(self) -> None:
        self._queued, self._dead = {}, None

    # readings

    def _of(self, value: Callable[[], float]) -> Reading:
        return lambda _: [Observation(value(), self._labels)]

    def _stat(self, field: str) -> Reading:
        return self._of(lambda: getattr(self._last, field))

    def _state(self, field: str) -> Reading:
        """1 or 0; nothing before `watch`."""

        def read(_: CallbackOptions) -> Iterable[Observation]:
            asked = getattr(self, field)
            return [] if asked is None else [Observation(int(asked()), self._labels)]

        return read

    def _kv_usage(self) -> float:
        return self._last.blocks_used / max(1, self._last.blocks_total)

    def _budget_usage(self) -> float:
        return self._last.scheduled_tokens / max(1, self._about.token_budget)

    def _read_queue(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(count, {**self._labels, semconv.PRIORITY: priority})
            for priority, count in self._queued.items()
        ]

    def _read_paused(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(int(priority in self._paused), {**self._labels, semconv.PRIORITY: priority})
            for priority in self._queued
        ]

    def _read_dead(self, _: CallbackOptions) -> Iterable[Observation]:
        return [] if self._dead is None else [Observation(self._dead)]

    def _read_info(self, _: CallbackOptions) -> Iterable[Observation]:
        self._steps.hand_over()  # readings come before the histograms in every collection
        self._flushes.hand_over()
        about = self._about
        who = {semconv.WORKER: about.worker_id, semconv.VERSION: about.version}
        return [Observation(1, {**self._labels, **who})]
