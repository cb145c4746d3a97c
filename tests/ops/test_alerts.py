"""Alerts are tested, explained, and about metrics that exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="module")
def alerts(root: Path) -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((root / "ops/alerts/tokenfleet.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_the_rules_are_valid_and_their_tests_pass(root: Path, promtool: Callable[..., str]) -> None:
    folder = root / "ops" / "alerts"
    assert "SUCCESS" in promtool("check", "rules", folder / "tokenfleet.yaml")
    assert "SUCCESS" in promtool("test", "rules", folder / "tests.yaml")
    assert "SUCCESS" in promtool("check", "config", root / "ops" / "prometheus.yaml")


def test_every_alert_is_tested_to_fire_and_to_keep_quiet(
    root: Path, alerts: dict[str, Any]
) -> None:
    tests = yaml.safe_load((root / "ops/alerts/tests.yaml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    fires = {check["alertname"] for check in checks if check["exp_alerts"]}
    quiet = {check["alertname"] for check in checks if not check["exp_alerts"]}
    assert fires == quiet == alerts.keys()


def test_every_alert_is_about_metrics_that_exist(
    alerts: dict[str, Any], shown: dict[str, set[str]], metrics_in: Callable[[str], set[str]]
) -> None:
    for name, rule in alerts.items():
        named = metrics_in(rule["expr"])
        assert named, name
        assert named <= shown.keys(), name


def test_every_alert_says_what_it_is_and_where_to_read_on(
    root: Path, alerts: dict[str, Any]
) -> None:
    sections = re.findall(r"^## (\w+)$", (root / "ops/runbook.md").read_text(), re.MULTILINE)
    assert sections == list(alerts), "one section per alert, in the order of the rules"
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description", "runbook"} == rule["annotations"].keys()
        assert rule["annotations"]["runbook"] == f"ops/runbook.md#{name.lower()}"


def test_the_runbook_links_to_what_is_there(root: Path) -> None:
    text = (root / "ops/runbook.md").read_text()
    anchors = {f"#{name.lower()}" for name in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target in anchors
        else:
            assert (root / "ops" / target).resolve().exists(), target


def test_the_collector_uses_only_what_it_declares(root: Path) -> None:
    config = yaml.safe_load((root / "ops/otel-collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= config[kind].keys()
    assert set(config["service"]["extensions"]) <= config["extensions"].keys()
    used = {part for p in config["service"]["pipelines"].values() for part in p["exporters"]}
    assert used == config["exporters"].keys(), "an exporter that no pipeline uses"
