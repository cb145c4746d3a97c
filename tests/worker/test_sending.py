"""What a producer's send span leaves in the job, and how spans and metrics are called."""

from __future__ import annotations

from opentelemetry import trace

from tokenfleet.producer import semconv, tracing
from tokenfleet.worker.observing.exporters import ExportConfig, Exporters


def test_the_send_span_reaches_the_job_of_a_producer_with_an_sdk() -> None:
    exporters = Exporters(ExportConfig(service="backend"))
    tracer = exporters.tracer_provider.get_tracer("backend")
    with tracer.start_as_current_span("handle request") as outer:
        with tracing.sending("smollm2", "default", job_id="j") as alone:
            pass
        with tracing.sending("smollm2", "default", batch=3) as batch:
            pass
    expected = outer.get_span_context().trace_id
    for carrier in (alone, batch):
        assert tracing.trace_id_of(carrier["traceparent"]) == f"{expected:032x}"
    context, links = tracing.received(alone["traceparent"], alone.get("tracestate"))
    assert trace.get_current_span(context).get_span_context().trace_id == expected
    assert not links
    context, links = tracing.received(batch["traceparent"], batch["tracestate"])
    assert not trace.get_current_span(context).get_span_context().is_valid
    assert [link.context.trace_id for link in links] == [expected]
    exporters.shutdown(1.0)


def test_without_a_trace_nothing_is_added_to_a_job() -> None:
    with tracing.sending("smollm2", "default", job_id="j") as carrier:
        assert carrier == {}


def test_names_are_spelled_as_the_conventions_spell_them() -> None:
    from opentelemetry.semconv._incubating.attributes import (
        gen_ai_attributes,
        messaging_attributes,
    )
    from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
    from opentelemetry.semconv.attributes import error_attributes, service_attributes

    known: set[str] = set()
    for module in (
        gen_ai_attributes,
        messaging_attributes,
        gen_ai_metrics,
        error_attributes,
        service_attributes,
    ):
        known |= {value for value in vars(module).values() if isinstance(value, str)}
    prefixes = ("gen_ai.", "messaging.", "error.", "service.")
    ours = {
        value
        for value in vars(semconv).values()
        if isinstance(value, str) and value.startswith(prefixes)
    }
    assert len(ours) > 25
    assert ours <= known
