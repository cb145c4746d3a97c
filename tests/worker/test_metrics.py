"""What /metrics shows, read as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tokenfleet.engine.stats import StepStats
from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.worker.broker import Broker
from tokenfleet.worker.observing.exporters import ExportConfig, Exporters
from tokenfleet.worker.observing.instruments import MOST_GATHERED
from tokenfleet.worker.observing.metrics import About, Instruments
from tokenfleet.worker.observing.prometheus import Scrape
from tokenfleet.worker.observing.queue_watch import QueueWatch
from tokenfleet.worker.observing.telemetry import Telemetry
from tokenfleet.worker.rules import Rules

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"
"""What a Prometheus server asks for."""
LABELS = {"gen_ai.operation.name": "chat"}


class Bench:
    """Instruments and the page made of them."""

    def __init__(self, *, vllm_names: bool = False) -> None:
        reader = InMemoryMetricReader()
        self.provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
        about = About("smollm2", token_budget=100, slots=8, worker_id="w1", version="1.2")
        self.instruments = Instruments(self.provider.get_meter("test"), about)
        self.scrape = Scrape(reader, "smollm2", vllm_names=vllm_names)

    def samples(self, accept: str = "") -> dict[str, list[Sample]]:
        content_type, body = self.scrape.render(accept)
        new = content_type.startswith("application/openmetrics-text")
        parse = openmetrics_families if new else text_string_to_metric_families
        found: dict[str, list[Sample]] = {}
        for family in parse(body.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
        return found

    def value(self, name: str, **labels: str) -> float:
        found = [s for s in self.samples().get(name, []) if labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, found)
        return float(found[0].value)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.provider.shutdown()


def a_span(sampler: Sampler) -> Any:
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    return provider.get_tracer("test").start_span("process m:default")


def test_a_scraper_that_asks_for_openmetrics_gets_the_trace_behind_a_slow_bucket(
    bench: Bench,
) -> None:
    span = a_span(ALWAYS_ON)
    bench.instruments.first_token(0.3, LABELS, trace.set_span_in_context(span))
    bench.instruments.first_token(0.3, LABELS)
    buckets = bench.samples(OPENMETRICS)["gen_ai_server_time_to_first_token_seconds_bucket"]
    traced = {s.labels["le"]: s.exemplar for s in buckets if s.exemplar}
    assert list(traced) == ["0.5"], "the bucket that the figure fell into"
    exemplar = traced["0.5"]
    assert exemplar is not None
    assert exemplar.value == 0.3
    assert exemplar.labels == {
        "trace_id": f"{span.get_span_context().trace_id:032x}",
        "span_id": f"{span.get_span_context().span_id:016x}",
    }


def test_a_figure_beyond_the_last_bound_keeps_its_exemplar(bench: Bench) -> None:
    bench.instruments.ended(9999.0, LABELS, trace.set_span_in_context(a_span(ALWAYS_ON)))
    buckets = bench.samples(OPENMETRICS)["gen_ai_server_request_duration_seconds_bucket"]
    assert [s.labels["le"] for s in buckets if s.exemplar] == ["+Inf"]


def test_a_trace_that_is_not_kept_is_nobodys_exemplar(bench: Bench) -> None:
    bench.instruments.first_token(0.3, LABELS, trace.set_span_in_context(a_span(ALWAYS_OFF)))
    buckets = bench.samples(OPENMETRICS)["gen_ai_server_time_to_first_token_seconds_bucket"]
    assert not [s for s in buckets if s.exemplar]


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=0.0.4", OPENMETRICS, "what;;,"])
def test_every_scraper_gets_a_page_that_it_can_read(accept: str) -> None:
    bench = Bench(vllm_names=True)
    bench.instruments.claimed(0.1, "default", resumed=False)
    bench.instruments.left("finished")
    samples = bench.samples(accept)
    assert samples["tokenfleet_jobs_claimed_total"][0].value == 1
    assert samples["vllm:request_queue_time_seconds_count"][0].value == 1
    bench.provider.shutdown()


def test_steps_show_bytes_read_and_where_the_time_went(bench: Bench) -> None:
    first = StepStats(step=1, step_s_total=1.0, forward_s_total=0.75, sample_s_total=0.125)
    first.read_bytes_total = 1000
    bench.instruments.step(first)
    second = StepStats(step=2, step_s_total=2.0, forward_s_total=1.5, sample_s_total=0.25)
    second.read_bytes_total = 3000
    bench.instruments.step(second)
    name = "tokenfleet_step_phase_seconds_total"
    assert bench.value("tokenfleet_read_bytes_total") == 3000
    assert bench.value(name, phase="forward") == 1.5
    assert bench.value(name, phase="sample") == 0.25
    assert bench.value(name, phase="other") == 0.25
    assert bench.value("tokenfleet_token_budget_tokens") == 100
    assert bench.value("tokenfleet_slots") == 8


@pytest.mark.parametrize("steps", [1, MOST_GATHERED, MOST_GATHERED + 3])
def test_every_page_shows_all_steps_and_flushes_so_far_each_once(bench: Bench, steps: int) -> None:
    for _ in range(steps):
        bench.instruments.step(StepStats(step_s=0.004))
        bench.instruments.flushed(0.002)
    for name, each in (("step_duration", 0.004), ("flush_duration", 0.002)):
        for _ in range(2):
            assert bench.value(f"tokenfleet_{name}_seconds_count") == steps
            assert bench.value(f"tokenfleet_{name}_seconds_sum") == pytest.approx(steps * each)


def test_errors_and_retries_of_the_engine_are_counted(bench: Bench) -> None:
    bench.instruments.step(StepStats(errors_total=2, oom_retries_total=1))
    assert bench.value("tokenfleet_sequence_errors_total") == 2
    assert bench.value("tokenfleet_oom_retries_total") == 1


def test_a_result_is_counted_by_tokens_and_by_why_its_choices_ended() -> None:
    bench = Bench(vllm_names=True)
    bench.instruments.result(7, 30, ["stop", "length", "stop"])
    assert bench.value("tokenfleet_job_prompt_tokens_sum") == 7
    assert bench.value("tokenfleet_job_output_tokens_sum") == 30
    assert bench.value("tokenfleet_choices_ended_total", finish_reason="stop") == 2
    assert bench.value("vllm:request_success_total", finished_reason="length") == 1
    assert bench.value("vllm:request_generation_tokens_count", model_name="smollm2") == 1
    bench.provider.shutdown()


def test_a_worker_says_what_it_is_and_how_it_is(bench: Bench) -> None:
    assert "tokenfleet_ready" not in bench.samples(), "nothing before anybody knows"
    state = {"ready": True, "broker": False}
    bench.instruments.watch(ready=lambda: state["ready"], broker=lambda: state["broker"])
    assert bench.value("tokenfleet_ready") == 1
    assert bench.value("tokenfleet_broker_reachable") == 0
    state["ready"] = False
    assert bench.value("tokenfleet_ready") == 0
    assert bench.value("tokenfleet_worker_info", worker="w1", version="1.2", model="smollm2") == 1


class Watched:
    """A queue watch with the page that shows what it saw."""

    def __init__(self, lab: Any, queue: Any) -> None:
        self.exporters = Exporters(ExportConfig(instance="w1"))
        self.telemetry = Telemetry(self.exporters, worker_id="w1", model="m", token_budget=1)
        self.watch = QueueWatch(queue, lab.connection, Broker(), self.telemetry)

    def shown(self, *names: str) -> dict[str, float]:
        names = names or ("tokenfleet_queue_jobs", "tokenfleet_dead_letters")
        text = self.telemetry.render_metrics()[1].decode()
        return {
            sample.labels.get("priority", "dead"): sample.value
            for family in text_string_to_metric_families(text)
            if family.name in names
            for sample in family.samples
        }


async def test_waiting_jobs_are_shown_by_priority_and_running_ones_are_not(
    valkey_lab: Any,
) -> None:
    queue = await valkey_lab.queue()
    for priority in ("interactive", "batch", "batch"):
        await valkey_lab.submit(priority=priority)
    watched = Watched(valkey_lab, queue)
    assert watched.shown() == {}
    await watched.watch.look()
    assert watched.shown() == {"interactive": 1, "default": 0, "batch": 2, "dead": 0}
    assert len(await queue.claim(1)) == 1
    await watched.watch.look()
    assert watched.shown()["interactive"] == 0
    watched.telemetry.shutdown(1.0)


async def test_a_paused_queue_is_shown_as_one_until_it_is_resumed(valkey_lab: Any) -> None:
    queue = await valkey_lab.queue()
    rules = Rules(valkey_lab.connection)
    await rules.pause("m", ["batch"])
    await rules.pause("another", ["default"])
    watched = Watched(valkey_lab, queue)
    await watched.watch.look()
    name = "tokenfleet_queue_paused"
    assert watched.shown(name) == {"interactive": 0, "default": 0, "batch": 1}
    await rules.resume("m")
    await watched.watch.look()
    assert watched.shown(name) == {"interactive": 0, "default": 0, "batch": 0}
    watched.telemetry.shutdown(1.0)


async def test_a_dead_letter_is_shown(valkey_lab: Any) -> None:
    queue = await valkey_lab.queue()
    await valkey_lab.submit(max_failures=0)
    (job,) = await queue.claim(1)
    await queue.fail(job, "engine_died", "it died", retryable=True)
    watched = Watched(valkey_lab, queue)
    await watched.watch.look()
    assert watched.shown()["dead"] == 1
    watched.telemetry.shutdown(1.0)


async def test_no_figure_is_shown_while_redis_does_not_answer(
    valkey_lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await valkey_lab.queue()
    watched = Watched(valkey_lab, queue)
    await watched.watch.look()
    assert watched.shown()

    async def away() -> dict[str, int]:
        raise BrokerUnavailable("gone")

    monkeypatch.setattr(queue, "backlog", away)
    await watched.watch.look()
    assert watched.shown() == {}
    watched.telemetry.shutdown(1.0)
