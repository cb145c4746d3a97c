"""What happens to jobs, as spans and metrics: the only door from the worker to OpenTelemetry.

A job has one `process` span per attempt and in it one span of the operation (`chat` or
`text_completion`); what happens in between is an event on the latter. There is never a span per
step or token, and no method here waits for anything: a collector that is away costs a job nothing.
Where spans go nowhere, a trace that would begin here is an id for the log, and is not recorded.

    send <queue>            producer/tracing.py
      process <queue>       claimed -> left this worker      child of send; of a batch, linked to it
        chat <model>        events: claimed, first_token, preempted, resumed
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from tokenfleet.producer import semconv, tracing
from tokenfleet.worker.observing import attributes
from tokenfleet.worker.observing.exporters import ExportConfig, Exporters
from tokenfleet.worker.observing.metrics import About, Instruments
from tokenfleet.worker.observing.prometheus import Scrape

if TYPE_CHECKING:
    from tokenfleet.engine.stats import StepStats
    from tokenfleet.producer.protocol import JobResult
    from tokenfleet.worker.queue import ClaimedJob
    from tokenfleet.worker.settings import WorkerSettings

GONE_ON = ("released", "lost")
"""States in which a job leaves this worker without having ended."""
REMEMBERED = 256
"""Jobs that have left and whose trace ids are still known."""
FAILURES = ("failed", "expired", "lost")


@dataclass(slots=True)
class _Running:
    """One attempt on this worker."""

    process: Span
    operation: Span
    labels: dict[str, str]
    waited_s: float
    """From submission to this claim, by the server's clock."""
    claimed_at: float
    first_token_at: float | None = None
    offset: int = 0
    """Output tokens that earlier attempts had logged."""

    @property
    def context(self) -> Context:
        """In which a figure of this job is recorded: it makes the span the figure's exemplar."""
        return trace.set_span_in_context(self.process)


class Telemetry:
    """Spans and metrics of one worker process. A job that is not known here is passed over.

    Args:
        exporters: providers to make spans and instruments with; shut down with this object.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        exporters: Exporters,
        *,
        worker_id: str,
        model: str,
        token_budget: int,
        slots: int = 0,
        vllm_names: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exporters = exporters
        self._worker_id = worker_id
        self._model = model
        self._clock = clock
        self._tracer = exporters.tracer_provider.get_tracer(semconv.INSTRUMENTATION)
        self._instruments = Instruments(
            exporters.meter_provider.get_meter(semconv.INSTRUMENTATION),
            About(model, token_budget, slots, worker_id, version("tokenfleet")),
        )
        self._scrape = Scrape(exporters.scrape, model, vllm_names=vllm_names)
        self._running: dict[tuple[str, int], _Running] = {}
        self._left: OrderedDict[tuple[str, int], Span] = OrderedDict()

    @classmethod
    def from_settings(cls, settings: WorkerSettings, worker_id: str) -> Telemetry:
        config = ExportConfig(
            instance=worker_id,
            version=version("tokenfleet"),
            otlp_endpoint=settings.otlp_endpoint,
            otlp_protocol=settings.otlp_protocol,
            trace_file=settings.trace_file,
        )
        exporters = Exporters(config, root_sampler=None if config.exports_spans else ALWAYS_OFF)
        return cls(
            exporters,
            worker_id=worker_id,
            model=settings.served_name,
            token_budget=settings.max_num_batched_tokens,
            slots=settings.max_num_seqs,
            vllm_names=settings.vllm_metric_names,
        )

    def job_claimed(self, job: ClaimedJob, claimed_at: float | None = None) -> None:
        """A claim succeeded; a job that has logged tokens is also `resumed` by this.

        Args:
            claimed_at: when, by this object's clock; now, when not given.
        """
        parent, links = tracing.received(job.request.traceparent, job.request.tracestate)
        process = self._tracer.start_span(
            f"{semconv.PROCESS} {semconv.queue_name(job.request.model, job.priority)}",
            context=parent,
            kind=SpanKind.CONSUMER,
            links=links,
            attributes=attributes.of_process(job, self._worker_id),
        )
        operation = semconv.operation_name(chat=job.request.messages is not None)
        span = self._tracer.start_span(
            f"{operation} {job.request.model}",
            context=trace.set_span_in_context(process),
            attributes=attributes.of_operation(job, operation),
        )
        span.add_event(semconv.EVENT_CLAIMED, {semconv.JOB_ATTEMPT: job.attempt})
        waited_s = (job.claimed_ms - job.submitted_ms) / 1000
        self._running[job.id, job.attempt] = _Running(
            process=process,
            operation=span,
            labels={
                **attributes.labels(operation, job.request.model),
                semconv.JOB_PRIORITY: job.priority,
            },
            waited_s=waited_s,
            claimed_at=self._clock() if claimed_at is None else claimed_at,
            offset=job.offset,
        )
        self._instruments.claimed(
            waited_s,
            job.priority,
            resumed=job.offset > 0,
            context=trace.set_span_in_context(process),
        )
        if job.offset:
            self.resumed(job, job.offset)

    def first_token(self, job: ClaimedJob) -> None:
        """The first token of this attempt; only a job's very first one counts as its TTFT."""
        running = self._running.get((job.id, job.attempt))
        if running is None or running.first_token_at is not None:
            return
        running.first_token_at = self._clock()
        running.operation.add_event(semconv.EVENT_FIRST_TOKEN, {semconv.JOB_OFFSET: running.offset})
        if running.offset == 0:
            self._instruments.first_token(
                running.waited_s + running.first_token_at - running.claimed_at,
                running.labels,
                running.context,
            )

    def preempted(self, job: ClaimedJob) -> None:
        """The engine took the job's blocks back; it waits to be computed again."""
        if running := self._running.get((job.id, job.attempt)):
            running.operation.add_event(semconv.EVENT_PREEMPTED)

    def resumed(self, job: ClaimedJob, offset: int) -> None:
        """The job goes on behind `offset` output tokens that an earlier attempt logged."""
        if running := self._running.get((job.id, job.attempt)):
            running.operation.add_event(semconv.EVENT_RESUMED, {semconv.JOB_OFFSET: offset})

    def job_ended(
        self,
        job: ClaimedJob,
        state: str,
        result: JobResult | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """The job left this worker.

        Args:
            state: a terminal state, or "released" (handed back) or "lost" (the lease was).
            result: what the job came to, where it did.
            error: code of the failure, where it was one.
        """
        running = self._running.pop((job.id, job.attempt), None)
        if running is None:
            return
        self._remember(job, running.process)
        now = self._clock()
        self._instruments.left(state)
        failure = (error or state) if state in FAILURES else None
        if state not in GONE_ON:
            labels = running.labels | ({semconv.ERROR_TYPE: failure} if failure else {})
            seconds = running.waited_s + now - running.claimed_at
            self._instruments.ended(seconds, labels, running.context)
        if result is not None:
            self._record_result(running, state, result, now)
        for span in (running.operation, running.process):
            span.set_attribute(semconv.JOB_STATE, state)
            if failure:
                span.set_attribute(semconv.ERROR_TYPE, failure)
                span.set_status(Status(StatusCode.ERROR, failure))
            span.end()

    def _record_result(self, running: _Running, state: str, result: JobResult, now: float) -> None:
        running.operation.set_attributes(attributes.of_result(result))
        usage = result.usage
        self._instruments.result(
            usage.prompt_tokens,
            usage.completion_tokens,
            [choice.finish_reason or state for choice in result.choices],
        )
        made = result.usage.completion_tokens - running.offset
        if running.first_token_at is not None and made > 1:
            pace = (now - running.first_token_at) / (made - 1)
            self._instruments.token_pace(pace, running.labels, running.context)

    def step(self, stats: StepStats) -> None:
        """Figures of the engine's latest step. Steps may be left out; the totals hold them all."""
        self._instruments.step(stats)

    @property
    def last_step(self) -> StepStats:
        """What the engine last said; all zero before its first step."""
        return self._instruments.last_step

    def engine_restarted(self) -> None:
        self._instruments.engine_restarted()

    def flushed(self, seconds: float) -> None:
        """One emit for all running jobs took this long."""
        self._instruments.flushed(seconds)

    def jobs_reclaimed(self, jobs: int) -> None:
        """This worker moved on that many jobs whose lease was over."""
        self._instruments.reclaimed(jobs)

    def watch(self, *, ready: Callable[[], bool], broker: Callable[[], bool]) -> None:
        """Whom to ask, at every scrape, whether the worker is ready and Redis reachable."""
        self._instruments.watch(ready=ready, broker=broker)

    def queue_seen(
        self, waiting: Mapping[str, int], paused: Iterable[str], dead_letters: int
    ) -> None:
        """What lies in Redis: waiting jobs of our model by priority, which of these queues are
        paused, dead letters of all models."""
        self._instruments.queue_seen(waiting, paused, dead_letters)

    def queue_unseen(self) -> None:
        """Redis did not say: better no figure than an old one."""
        self._instruments.queue_unseen()

    def trace_ids(self, job_id: str, attempt: int) -> Mapping[str, str]:
        """trace_id and span_id of a job on this worker, for its log lines; empty when unknown.

        A job that has just left is still known: its last line is written after that.
        """
        running = self._running.get((job_id, attempt))
        span = running.process if running else self._left.get((job_id, attempt))
        if span is None:
            return {}
        context = span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def _remember(self, job: ClaimedJob, span: Span) -> None:
        self._left[job.id, job.attempt] = span
        while len(self._left) > REMEMBERED:
            self._left.popitem(last=False)

    def render_metrics(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body of /metrics, as the Accept header wants them."""
        return self._scrape.render(accept)

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """End open spans and export what waits, for at most `timeout_s`.

        Blocks: call it last or in a thread.
        """
        for running in self._running.values():
            running.operation.end()
            running.process.end()
        self._running.clear()
        self._exporters.shutdown(timeout_s)
