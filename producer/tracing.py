"""The trace context of a job: into the queue with it, and out again on the worker's side.

Only opentelemetry-api is used: a process without an SDK pays next to nothing and passes on whatever
context it is in. A job submitted alone is a child of its `send` span. Jobs of one batch share that
span, and each starts a trace of its own that links to it; a member in `tracestate` says which it
is, so that a sampled flag and a trace id survive the queue either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from tokenfleet.producer import semconv

_STATE_KEY = "tokenfleet"
_BATCH = "batch"
_W3C = TraceContextTextMapPropagator()


@contextmanager
def sending(
    model: str, priority: str, *, job_id: str | None = None, batch: int | None = None
) -> Iterator[dict[str, str]]:
    """The `send <queue>` span around one submission.

    Args:
        job_id: the job's, where one job is sent.
        batch: how many jobs are sent together; None for one alone.

    Yields:
        The carrier to put into each job: traceparent and tracestate, or nothing when no trace is
        on.
    """
    queue = semconv.queue_name(model, priority)
    attributes: dict[str, AttributeValue] = {
        semconv.MESSAGING_SYSTEM: semconv.MESSAGING_SYSTEM_REDIS,
        semconv.MESSAGING_OPERATION_NAME: semconv.SEND,
        semconv.MESSAGING_OPERATION_TYPE: semconv.SEND,
        semconv.MESSAGING_DESTINATION_NAME: queue,
    }
    if job_id is not None:
        attributes[semconv.MESSAGING_MESSAGE_ID] = job_id
    if batch is not None:
        attributes[semconv.MESSAGING_BATCH_MESSAGE_COUNT] = batch
    with trace.get_tracer(semconv.INSTRUMENTATION).start_as_current_span(
        f"{semconv.SEND} {queue}",
        kind=SpanKind.PRODUCER,
        attributes=attributes,
        record_exception=False,  # its message may quote the prompt
        set_status_on_exception=False,
    ) as span:
        try:
            yield _carrier(span.get_span_context(), in_batch=batch is not None)
        except Exception as error:
            span.set_attribute(semconv.ERROR_TYPE, type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise


@contextmanager
def continuing(carrier: Mapping[str, str]) -> Iterator[None]:
    """What is sent inside belongs to the trace of a request that came with these headers.

    A malformed traceparent counts as none.
    """
    token = attach(_W3C.extract(carrier, Context()))
    try:
        yield
    finally:
        detach(token)


def received(traceparent: str | None, tracestate: str | None) -> tuple[Context, list[Link]]:
    """Where the span of a received job belongs: its parent context, and its links.

    A malformed traceparent counts as none: the span starts a new trace.
    """
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    context = _W3C.extract({k: v for k, v in carrier.items() if isinstance(v, str)}, Context())
    sender = trace.get_current_span(context).get_span_context()
    if not sender.is_valid:
        return Context(), []
    if sender.trace_state.get(_STATE_KEY) == _BATCH:
        return Context(), [Link(sender)]
    return context, []


def trace_id_of(traceparent: str | None) -> str | None:
    """The trace id in a traceparent, as 32 hex digits; None when there is none."""
    context = _W3C.extract({"traceparent": traceparent} if traceparent else {}, Context())
    sender = trace.get_current_span(context).get_span_context()
    return f"{sender.trace_id:032x}" if sender.is_valid else None


def _carrier(sender: SpanContext, *, in_batch: bool) -> dict[str, str]:
    carrier: dict[str, str] = {}
    if not sender.is_valid:
        return carrier
    if in_batch:
        sender = SpanContext(
            sender.trace_id,
            sender.span_id,
            is_remote=False,
            trace_flags=sender.trace_flags,
            trace_state=sender.trace_state.add(_STATE_KEY, _BATCH),
        )
    _W3C.inject(carrier, trace.set_span_in_context(trace.NonRecordingSpan(sender)))
    return carrier
