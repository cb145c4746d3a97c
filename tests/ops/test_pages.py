"""The pages for people on call name commands, settings, panels and alerts that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tokenfleet.producer.gateway.settings import GatewaySettings
from tokenfleet.worker.commands.cli import EXAMPLES
from tokenfleet.worker.settings import WorkerSettings

PAGES = ("ops/runbook.md", "ops/README.md", "ops/telemetry.md", "deploy/README.md")
OTHERS = {
    "submit_many",
    "stop_grace_period",
    "error_message",
    "finish_reason",
    "trace_id",
    "span_id",
    "job_id",
    "error_type",
}
"""Words with an underscore that are calls, keys of compose, fields of results, logs and labels."""


def logged_by(path: Path) -> list[str]:
    """Names of the events that a module logs."""
    return re.findall(r'\blog\.\w+\(\s*"([a-z_]+)"', path.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(root: Path, page: str) -> None:
    known = {*EXAMPLES, *(name.split()[0] for name in EXAMPLES)}
    for line in re.findall(r"`tokenfleet ([^`]*)`", (root / page).read_text()):
        words = line.split()
        assert " ".join(words[:2]) in known or words[0] in known, line


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_exists(root: Path, page: str) -> None:
    text = (root / page).read_text()
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", text))
    spans = {"first_token"}
    events = {name for path in (root / "worker").rglob("*.py") for name in logged_by(path)}
    events |= {name for path in (root / "producer").rglob("*.py") for name in logged_by(path)}
    codes = {"prompt_too_long", "invalid_parameter", "internal_error", "text_completion"}
    metrics = {name for name in named if name.startswith(("tokenfleet_", "gen_ai_", "vllm"))}
    settings = {*WorkerSettings.model_fields, *GatewaySettings.model_fields}
    assert named - OTHERS - spans - events - codes - metrics <= settings
    for flag in re.findall(r"`--([\w-]+)", text):
        assert flag.replace("-", "_") in settings | {"log_format", "new_key", "parts"}, flag


def test_the_runbook_names_panels_that_exist(root: Path) -> None:
    titles = {
        panel["title"]
        for name in ("fleet", "worker")
        for panel in json.loads((root / f"ops/dashboards/{name}.json").read_text())["panels"]
    }
    named = set(re.findall(r"\*([A-Z][^*\n]+)\*", (root / "ops/runbook.md").read_text()))
    said_by_others = {"Out of memory"}
    assert len(named) > 6
    assert named - said_by_others <= titles


def test_the_collectors_and_prometheus_configuration_are_what_compose_mounts(root: Path) -> None:
    compose = (root / "deploy/compose.yaml").read_text()
    assert "../ops/otel-collector.yaml:" in compose
    assert "../ops:/etc/prometheus:ro" in compose
