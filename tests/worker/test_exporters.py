"""OTLP as real receivers get it, and what happens when the receiver is a hole in the ground."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from tokenfleet.worker.observing.exporters import QUEUE_SPANS, ExportConfig, Exporters

WAIT_S = 240.0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_spans_and_metrics_arrive_over_otlp(protocol: str, request: Any) -> None:
    received = request.getfixturevalue(f"{protocol}_receiver")
    exporters = Exporters(
        ExportConfig(instance="w1", otlp_endpoint=received.endpoint + "/", otlp_protocol=protocol)
    )
    exporters.meter_provider.get_meter("test").create_counter("tokens").add(1)
    exporters.tracer_provider.get_tracer("test").start_span("chat smollm2").end()
    assert exporters.shutdown(WAIT_S)
    assert received.span_names() == {"chat smollm2"}
    assert received.metric_names() == {"tokens"}


def test_metrics_are_sent_at_intervals_without_a_shutdown(grpc_receiver: Any) -> None:
    exporters = Exporters(
        ExportConfig(otlp_endpoint=grpc_receiver.endpoint), metric_interval_ms=20.0
    )
    exporters.meter_provider.get_meter("test").create_counter("tokens").add(1)
    assert "tokens" in grpc_receiver.metric_names()
    assert exporters.shutdown(WAIT_S)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_black_hole_neither_slows_spans_nor_delays_the_shutdown(
    protocol: str, black_hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # eight exports wait for it, one after the other, and the fixture for all of them
    monkeypatch.setattr("tokenfleet.worker.observing.exporters.EXPORT_TIMEOUT_S", 0.3)
    exporters = Exporters(ExportConfig(otlp_endpoint=black_hole, otlp_protocol=protocol))
    tracer = exporters.tracer_provider.get_tracer("test")
    for _ in range(5 * QUEUE_SPANS):  # were one of them to wait for room, it would wait for ever
        tracer.start_span("chat smollm2").end()
    assert exporters.shutdown(0.5) is False, "it gave up, with the export still under way"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_process_with_a_black_hole_still_exits(protocol: str, black_hole: str) -> None:
    script = (
        "import time\n"
        "from tokenfleet.worker.observing.exporters import ExportConfig, Exporters\n"
        f"e = Exporters(ExportConfig(otlp_endpoint={black_hole!r}, otlp_protocol={protocol!r}))\n"
        "e.tracer_provider.get_tracer('test').start_span('x').end()\n"
        "e.meter_provider.get_meter('test').create_counter('c').add(1)\n"
        "time.sleep(1.2)\n"  # an export is under way
        "print(e.shutdown(0.5), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_a_file_is_written_although_the_collector_is_away(tmp_path: Any, black_hole: str) -> None:
    path = tmp_path / "trace.jsonl"
    exporters = Exporters(ExportConfig(otlp_endpoint=black_hole, trace_file=path))
    exporters.tracer_provider.get_tracer("test").start_span("chat smollm2").end()
    exporters.shutdown(1.0)
    while not path.read_text().endswith("\n"):  # a slow machine may not have come to it
        time.sleep(0.01)
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ExportConfig(otlp_protocol="udp"), "otlp_protocol must be one of .*'udp'"),
        (ExportConfig(otlp_endpoint="collector:4317"), "otlp_endpoint must be a URL"),
    ],
)
def test_a_wrong_destination_is_refused_at_the_start(config: ExportConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exporters(config)
