"""Spans and metrics of jobs, exactly as a collector or a scrape sees them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from tokenfleet.engine.stats import StepStats
from tokenfleet.producer.keys import new_job_id
from tokenfleet.producer.protocol import Choice, JobRequest, JobResult, SamplingParams, Usage
from tokenfleet.worker.observing.exporters import ExportConfig, Exporters
from tokenfleet.worker.observing.telemetry import Telemetry
from tokenfleet.worker.queue import ClaimedJob
from tokenfleet.worker.settings import load_settings

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01"
NOT_SAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Watched:
    """A Telemetry whose spans stay in memory and whose clock stands still."""

    telemetry: Telemetry
    spans: InMemorySpanExporter
    clock: Clock = field(default_factory=Clock)

    def ended(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.spans.get_finished_spans()}

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        families = text_string_to_metric_families(self.telemetry.render_metrics()[1].decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def value(self, name: str) -> float:
        (found,) = [value for (known, _), value in self.samples().items() if known == name]
        return found


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    made: list[Telemetry] = []

    def make(**options: Any) -> Watched:
        exporters = Exporters(ExportConfig(instance="w1"))
        memory = InMemorySpanExporter()
        exporters.tracer_provider.add_span_processor(SimpleSpanProcessor(memory))
        clock = Clock()
        telemetry = Telemetry(
            exporters, worker_id="w1", model="smollm2", token_budget=100, clock=clock, **options
        )
        made.append(telemetry)
        return Watched(telemetry, memory, clock)

    yield make
    for telemetry in made:
        telemetry.shutdown(1.0)


@pytest.fixture
def watched(watch: Callable[..., Watched]) -> Watched:
    return watch()


def a_job(*, attempt: int = 1, offset: int = 0, wait_ms: int = 1500, **request: Any) -> ClaimedJob:
    asked = {"model": "smollm2", "prompt": "Say something private.", **request}
    return ClaimedJob(
        id=new_job_id(0),
        attempt=attempt,
        request=JobRequest(**asked),
        offset=offset,
        logged=(),
        failures=0,
        priority="interactive",
        deadline_ms=None,
        submitted_ms=1_000_000,
        claimed_ms=1_000_000 + wait_ms,
    )


def a_result(tokens: int = 11, reason: str = "stop") -> JobResult:
    return JobResult(
        choices=(Choice(text="private too", token_ids=(1,) * tokens, finish_reason=reason),),
        usage=Usage(prompt_tokens=7, completion_tokens=tokens),
        model="smollm2",
    )


def test_a_job_is_two_spans_with_the_events_of_its_life(watched: Watched) -> None:
    job = a_job(
        traceparent=SAMPLED,
        messages=({"role": "user", "content": "private"},),
        prompt=None,
        sampling=SamplingParams(max_tokens=11, temperature=0.5, seed=2**64 - 1, n=2, top_k=5),
    )
    watched.telemetry.job_claimed(job)
    watched.telemetry.first_token(job)
    watched.telemetry.preempted(job)
    watched.telemetry.job_ended(job, "finished", a_result())

    spans = watched.ended()
    process, chat = spans["process smollm2:interactive"], spans["chat smollm2"]
    assert process.kind is SpanKind.CONSUMER
    assert process.attributes is not None
    assert process.attributes["messaging.system"] == "redis"
    assert process.attributes["messaging.message.id"] == job.id
    assert process.attributes["messaging.destination.partition.id"] == "0"
    assert process.attributes["messaging.consumer.group.name"] == "workers"
    assert chat.parent is not None
    assert chat.parent.span_id == process.get_span_context().span_id
    assert [event.name for event in chat.events] == ["claimed", "first_token", "preempted"]
    assert chat.attributes is not None
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.request.max_tokens"] == 11
    assert chat.attributes["gen_ai.request.seed"] == -1
    assert chat.attributes["gen_ai.usage.input_tokens"] == 7
    assert chat.attributes["gen_ai.usage.output_tokens"] == 11
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "private" not in json.dumps([span.to_json() for span in spans.values()])


def test_a_prompt_without_messages_is_a_text_completion(watched: Watched) -> None:
    job = a_job()
    watched.telemetry.job_claimed(job)
    watched.telemetry.job_ended(job, "finished", a_result())
    assert "text_completion smollm2" in watched.ended()


def test_a_single_job_continues_the_trace_of_its_producer(watched: Watched) -> None:
    job = a_job(traceparent=SAMPLED)
    watched.telemetry.job_claimed(job)
    assert watched.telemetry.trace_ids(job.id, 1)["trace_id"] == TRACE
    watched.telemetry.job_ended(job, "finished", a_result())
    process = watched.ended()["process smollm2:interactive"]
    assert process.parent is not None
    assert process.parent.span_id == 0xB7AD6B7169203331
    assert not process.links


def test_a_job_of_a_batch_starts_its_own_trace_and_links_to_the_producers(
    watched: Watched,
) -> None:
    job = a_job(traceparent=SAMPLED, tracestate="vendor=x,tokenfleet=batch")
    watched.telemetry.job_claimed(job)
    watched.telemetry.job_ended(job, "finished", a_result())
    process = watched.ended()["process smollm2:interactive"]
    assert process.parent is None
    assert process.get_span_context().trace_id != int(TRACE, 16)
    assert [link.context.trace_id for link in process.links] == [int(TRACE, 16)]


@pytest.mark.parametrize("tracestate", [None, "tokenfleet=batch"])
def test_what_the_producer_did_not_sample_is_not_exported(
    watched: Watched, tracestate: str | None
) -> None:
    job = a_job(traceparent=NOT_SAMPLED, tracestate=tracestate)
    watched.telemetry.job_claimed(job)
    watched.telemetry.job_ended(job, "finished", a_result())
    assert not watched.ended()
    assert watched.value("tokenfleet_jobs_claimed_total") == 1


@pytest.mark.parametrize(
    "traceparent",
    ["", "nonsense", f"00-{TRACE}-b7ad6b7169203331", f"00-{'0' * 32}-b7ad6b7169203331-01", "\x00"],
)
def test_a_malformed_traceparent_starts_a_new_trace(watched: Watched, traceparent: str) -> None:
    job = a_job(traceparent=traceparent, tracestate="=,=,tokenfleet=batch")
    watched.telemetry.job_claimed(job)
    watched.telemetry.job_ended(job, "finished", a_result())
    process = watched.ended()["process smollm2:interactive"]
    assert process.parent is None
    assert not process.links


def test_a_resumed_job_says_where_it_goes_on(watched: Watched) -> None:
    job = a_job(attempt=2, offset=40)
    watched.telemetry.job_claimed(job)
    watched.telemetry.first_token(job)
    watched.telemetry.job_ended(job, "finished", a_result(tokens=50))
    span = watched.ended()["text_completion smollm2"]
    events = {event.name: event.attributes for event in span.events}
    assert list(events) == ["claimed", "resumed", "first_token"]
    resumed = events["resumed"]
    assert resumed is not None
    assert resumed["tokenfleet.job.offset"] == 40
    assert watched.value("tokenfleet_jobs_resumed_total") == 1
    names = {name for name, _ in watched.samples()}
    assert "gen_ai_server_time_to_first_token_seconds_count" not in names


def test_durations_count_from_submission(watched: Watched) -> None:
    job = a_job(wait_ms=1500)
    watched.telemetry.job_claimed(job)
    watched.clock.now += 0.5
    watched.telemetry.first_token(job)
    watched.clock.now += 1.0
    watched.telemetry.job_ended(job, "finished", a_result(tokens=11))
    assert watched.value("tokenfleet_queue_wait_seconds_sum") == pytest.approx(1.5)
    assert watched.value("gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(2.0)
    assert watched.value("gen_ai_server_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert watched.value("gen_ai_server_request_duration_seconds_sum") == pytest.approx(3.0)


@pytest.mark.parametrize("state", ["released", "lost"])
def test_a_job_that_goes_on_elsewhere_has_no_duration_here(watched: Watched, state: str) -> None:
    job = a_job()
    watched.telemetry.job_claimed(job)
    watched.telemetry.job_ended(job, state)
    samples = watched.samples()
    assert not [name for name, _ in samples if name.startswith("gen_ai_server_request_duration")]
    assert samples["tokenfleet_jobs_ended_total", (("model", "smollm2"), ("state", state))] == 1
    assert samples["tokenfleet_jobs_running", (("model", "smollm2"),)] == 0


def test_a_failed_job_carries_its_code_as_error_type(watched: Watched) -> None:
    job = a_job()
    watched.telemetry.job_claimed(job)
    watched.telemetry.job_ended(job, "failed", error="prompt_too_long")
    for span in watched.ended().values():
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes is not None
        assert span.attributes["error.type"] == "prompt_too_long"
    (labels,) = [
        dict(labels)
        for name, labels in watched.samples()
        if name == "gen_ai_server_request_duration_seconds_count"
    ]
    assert labels["error_type"] == "prompt_too_long"


def test_no_label_names_a_job_or_a_tenant(watched: Watched) -> None:
    job = a_job(tenant="acme")
    watched.telemetry.job_claimed(job)
    watched.telemetry.first_token(job)
    watched.telemetry.job_ended(job, "finished", a_result())
    text = watched.telemetry.render_metrics()[1].decode()
    assert job.id not in text
    assert "acme" not in text


def test_an_unknown_job_and_a_second_end_are_passed_over(watched: Watched) -> None:
    job = a_job()
    watched.telemetry.first_token(job)
    watched.telemetry.job_ended(job, "finished")
    watched.telemetry.job_claimed(job)
    watched.telemetry.job_ended(job, "finished")
    watched.telemetry.job_ended(job, "failed")
    assert len(watched.spans.get_finished_spans()) == 2


def test_step_totals_become_counters_that_survive_an_engine_restart(watched: Watched) -> None:
    watched.telemetry.step(
        StepStats(step=3, decode_tokens_total=10, blocks_used=2, blocks_total=8, running=5)
    )
    watched.telemetry.step(StepStats(step=4, decode_tokens_total=15, blocks_used=4, blocks_total=8))
    watched.telemetry.engine_restarted()
    watched.telemetry.step(StepStats(step=1, decode_tokens_total=2, blocks_used=4, blocks_total=8))
    assert watched.value("tokenfleet_decode_tokens_total") == 17
    assert watched.value("tokenfleet_steps_total") == 5
    assert watched.value("tokenfleet_kv_cache_usage_ratio") == 0.5
    assert watched.value("tokenfleet_engine_restarts_total") == 1
    assert watched.value("tokenfleet_step_duration_seconds_count") == 3


def test_a_step_makes_no_span(watched: Watched) -> None:
    for step in range(100):
        watched.telemetry.step(StepStats(step=step))
    assert not watched.spans.get_finished_spans()


def test_the_names_of_vllm_dashboards_are_offered_only_when_asked_for(
    watch: Callable[..., Watched],
) -> None:
    plain, both = watch(), watch(vllm_names=True)
    for one in (plain, both):
        one.telemetry.step(StepStats(running=3, waiting=2, blocks_used=1, blocks_total=4))
    assert "vllm:" not in plain.telemetry.render_metrics()[1].decode()
    labels = (("model", "smollm2"), ("model_name", "smollm2"))
    samples = both.samples()
    assert samples["vllm:num_requests_running", labels] == 3
    assert samples["vllm:num_requests_waiting", labels] == 2
    assert samples["vllm:kv_cache_usage_perc", labels] == 0.25
    assert samples["tokenfleet_sequences_running", (("model", "smollm2"),)] == 3


@pytest.mark.parametrize(
    ("traceparent", "traced", "kept"),
    [(None, False, 0), (None, True, 2), (SAMPLED, False, 2), (NOT_SAMPLED, True, 0)],
)
def test_a_trace_that_goes_nowhere_is_an_id_and_not_recorded(
    tmp_path: Path, traceparent: str | None, traced: bool, kept: int
) -> None:
    """A producer's trace goes where the producer sends it: its jobs' figures still refer to it."""
    path = tmp_path / "trace.jsonl" if traced else None
    settings = load_settings(model=str(tmp_path), model_name="smollm2", trace_file=path)
    telemetry = Telemetry.from_settings(settings, "w1")
    recorded = InMemorySpanExporter()
    telemetry._exporters.tracer_provider.add_span_processor(SimpleSpanProcessor(recorded))
    job = a_job(traceparent=traceparent)
    telemetry.job_claimed(job)
    assert int(telemetry.trace_ids(job.id, 1)["trace_id"], 16) > 0
    telemetry.first_token(job)
    telemetry.job_ended(job, "finished", a_result())
    assert len(recorded.get_finished_spans()) == kept
    telemetry.shutdown(1.0)


def test_spans_reach_the_trace_file_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.jsonl"
    telemetry = Telemetry(
        Exporters(ExportConfig(instance="w1", trace_file=path)),
        worker_id="w1",
        model="smollm2",
        token_budget=1,
    )
    done, open_ = a_job(traceparent=SAMPLED), a_job()
    telemetry.job_claimed(done)
    telemetry.job_claimed(open_)
    telemetry.job_ended(done, "finished", a_result())
    telemetry.shutdown(240.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 4, "an open span is written at shutdown"
    (chat,) = [x for x in lines if x["trace_id"] == TRACE and x["name"].startswith("text")]
    assert chat["events"][0]["name"] == "claimed"
    assert chat["instance"] == "w1"
    assert chat["duration_s"] >= 0
    telemetry.shutdown(1.0)
