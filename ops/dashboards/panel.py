"""What a dashboard is made of, and how Grafana spells it.

A panel cannot be made without a unit and without saying what it shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: `queries` maps a legend to its PromQL."""

    title: str
    says: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    exemplars: bool = False
    log: bool = False
    """A logarithmic axis: what spans milliseconds to minutes."""
    limits: tuple[float, float | None] = (0, None)
    """Ends of the axis; None: as far as the data goes."""
    warn: float | None = None
    """From here on a stat is orange."""


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and what stands under it."""

    title: str
    panels: list[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file."""

    uid: str
    title: str
    says: str
    rows: list[Row]
    variables: dict[str, str] = field(default_factory=dict)
    """Name -> label_values query."""


M = 'model=~"$model"'
G = 'gen_ai_request_model=~"$model"'
I = 'instance=~"$instance"'
W = "[$__rate_interval]"


def quantiles(metric: str, match: str, *shares: float, by: str = "") -> dict[str, str]:
    """Legend -> quantile of a histogram over all workers that match, for each value of `by`."""
    return {
        f"p{share * 100:g}" + (f" {{{{{by}}}}}" if by else ""): f"histogram_quantile({share}, "
        f"sum by (le{', ' + by if by else ''}) (rate({metric}_bucket{{{match}}}{W})))"
        for share in shares
    }


def as_json(dashboard: Dashboard) -> str:
    """What Grafana imports."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        top = _place(row.panels, panels, top + 1)
    whole = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.says,
        "tags": ["tokenfleet"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(dashboard.variables)},
        "panels": panels,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _place(row: list[Panel], panels: list[dict[str, Any]], top: int) -> int:
    """Add a row's panels from left to right; returns the line below them."""
    left, bottom = 0, top
    for panel in row:
        if left + panel.width > WIDTH:
            left, top = 0, bottom
        where = {"x": left, "y": top, "w": panel.width, "h": panel.height}
        panels.append(_panel(panel, len(panels) + 1, where))
        left, bottom = left + panel.width, max(bottom, top + panel.height)
    return bottom


def _panel(panel: Panel, number: int, where: dict[str, int]) -> dict[str, Any]:
    least, most = panel.limits
    defaults: dict[str, Any] = {"unit": panel.unit}
    if not panel.log:
        defaults["min"] = least
    if most is not None:
        defaults["max"] = most
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.warn is not None:
        steps.append({"color": "orange", "value": panel.warn})
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": stacking,
            "scaleDistribution": {"type": "log", "log": 10} if panel.log else {"type": "linear"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": where,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": panel.kind == "table",
                "format": "table" if panel.kind == "table" else "time_series",
                "exemplar": panel.exemplars,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _options(kind: str) -> dict[str, Any]:
    if kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "graphMode": "area",
            "textMode": "value",
        }
    return {"showHeader": True}


def _variables(variables: dict[str, str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    ]
    for name, query in variables.items():
        found.append(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": SOURCE,
                "query": {"query": query, "refId": name},
                "definition": query,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
                "refresh": 2,
                "sort": 1,
            }
        )
    return found
