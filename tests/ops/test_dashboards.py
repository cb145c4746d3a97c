"""The dashboards draw what workers show, say in which unit, and fit together."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

NAMES = ("fleet", "worker")
ADDED_BY_PROMETHEUS = {"instance", "job", "le"}
SHARED = ("tokenfleet_queue_jobs", "tokenfleet_queue_paused", "tokenfleet_dead_letters")
"""Read from Redis by every worker alike."""
NOT_DRAWN = {
    "tokenfleet_token_budget_usage_ratio": "one step's share, for a look at /metrics; drawn "
    "is the share of all steps between two scrapes",
}
"""Metrics in no dashboard and no alert, each with the reason."""


@pytest.fixture(params=NAMES)
def dashboard(request: Any, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (root / "ops" / "dashboards" / f"{request.param}.json").read_text()
    )
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def test_the_files_are_what_their_panels_make(root: Path, tmp_path: Path) -> None:
    for file in (root / "ops" / "dashboards").glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    subprocess.run([sys.executable, str(tmp_path / "build.py")], check=True, timeout=240)
    for name in NAMES:
        committed = (root / "ops" / "dashboards" / f"{name}.json").read_text()
        assert committed == (tmp_path / f"{name}.json").read_text(), (
            "run python ops/dashboards/build.py"
        )


def test_every_panel_has_a_unit_a_sentence_and_a_legend(dashboard: dict[str, Any]) -> None:
    assert len(panels(dashboard)) > 15
    for panel in panels(dashboard):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert len(panel["description"]) > 15, panel["title"]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert all(legends), panel["title"]
        assert len(set(legends)) == len(legends), panel["title"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)


def test_no_panel_covers_another(dashboard: dict[str, Any]) -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        return {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }

    for one, other in combinations(dashboard["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in dashboard["panels"])


def test_every_query_asks_for_metrics_and_labels_that_exist(
    dashboard: dict[str, Any],
    shown: dict[str, set[str]],
    metrics_in: Callable[[str], set[str]],
) -> None:
    for query in queries(dashboard):
        named = metrics_in(query)
        assert named, query
        assert named <= shown.keys(), query
        labels = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", query))
        grouped = re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", query)
        labels |= {label.strip() for group in grouped for label in group.split(",")}
        known = set.union(*(shown[name] for name in named)) | ADDED_BY_PROMETHEUS
        assert labels <= known, query


def test_every_variable_is_declared_and_used(dashboard: dict[str, Any]) -> None:
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) - {"__rate_interval"}
    assert used <= declared
    queries_of_variables = json.dumps(dashboard["templating"])
    assert declared <= used | set(re.findall(r"\$\{?(\w+)", queries_of_variables))


def test_every_query_is_promql(
    dashboard: dict[str, Any], promtool: Callable[..., str], tmp_path: Path
) -> None:
    rules = [
        {"record": f"q:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries(dashboard))
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_every_metric_is_drawn_or_alerted_on_or_left_out_for_a_reason(
    root: Path, shown: dict[str, set[str]], metrics_in: Callable[[str], set[str]]
) -> None:
    texts = [
        *((root / "ops" / "dashboards" / f"{name}.json").read_text() for name in NAMES),
        (root / "ops" / "alerts" / "tokenfleet.yaml").read_text(),
    ]
    drawn = set.union(*(metrics_in(text) for text in texts))
    assert shown.keys() - drawn == NOT_DRAWN.keys()


def test_what_every_worker_reads_from_redis_is_never_added_up(root: Path) -> None:
    for name in NAMES:
        for query in queries(json.loads((root / "ops/dashboards" / f"{name}.json").read_text())):
            for shared in SHARED:
                if shared in query:
                    assert re.search(rf"max(?: by \([^)]*\))? \({shared}|max\({shared}", query)
