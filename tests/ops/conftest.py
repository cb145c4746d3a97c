"""What ops/ may speak of: the metrics that a worker really shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tokenfleet.engine.stats import StepStats
from tokenfleet.producer.gateway.metrics import GatewayMetrics, Passage
from tokenfleet.worker.observing.metrics import About, Instruments
from tokenfleet.worker.observing.prometheus import Scrape

METRIC = re.compile(r"\b(?:tokenfleet_(?!job_priority)|gen_ai_server_)\w+")
"""A metric's name and not that label's, which begins alike."""
SUFFIXES = ("_bucket", "_count", "_sum")


def family_of(name: str) -> str:
    """A histogram's or a counter's family for the name of one of its series."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def shown() -> dict[str, set[str]]:
    """Family (counters with _total) -> labels, from a page on which everything has happened."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    made = Instruments(provider.get_meter("test"), About("m", 100, 8, "w1", "1"))
    labels = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokenfleet",
        "gen_ai.request.model": "m",
        "tokenfleet.job.priority": "default",
    }
    made.claimed(1.0, "default", resumed=False)
    made.first_token(1.0, labels)
    made.token_pace(1.0, labels)
    made.ended(1.0, {**labels, "error.type": "x"})
    made.result(1, 1, ["stop"])
    made.step(StepStats(step=1, step_s_total=1.0, forward_s_total=0.5))
    made.flushed(0.1)
    made.engine_restarted()
    made.queue_seen({"default": 1}, ["default"], 1)
    made.watch(ready=lambda: True, broker=lambda: True)
    _, page = Scrape(reader, "m", vllm_names=False).render("application/openmetrics-text")
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found.setdefault(family_of(sample.name), set()).update(sample.labels)
    provider.shutdown()
    for family in text_string_to_metric_families(_gateways_page()):
        for sample in family.samples:
            found.setdefault(family_of(sample.name), set()).update(sample.labels)
    return found


def _gateways_page() -> str:
    """The gateway's, after one stream."""
    metrics = GatewayMetrics([])
    passage = Passage(0.0, submitted_at=0.0, first_token_at=0.0)
    metrics.first_sent(passage)
    metrics.answered(None, 200, passage)
    return metrics.render("application/openmetrics-text;version=1.0.0")[1].decode()


@pytest.fixture(scope="session")
def metrics_in() -> Callable[[str], set[str]]:
    """Families that a query or a text speaks of."""
    return lambda text: {family_of(name) for name in METRIC.findall(text)}


@pytest.fixture(scope="session")
def promtool() -> Callable[..., str]:
    """Run promtool; its output. Fails when it does."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed; apt-get install prometheus runs these too")

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [found, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
