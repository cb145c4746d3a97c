"""The part of the page that changes: totals, plots, tables.

Invariant: what is not known is a dash, never a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tokenfleet.producer.fleet_view import FleetStatus, RunningJob, WorkerLine, duration
from tokenfleet.producer.gateway.page.plots import Series, plot

DASH = "–"
MOST_JOBS = 20
"""Running jobs on the page."""
STALE_S = 10.0
"""A worker that was not seen for this long has missed two heartbeats."""

Sample = tuple[float, float, int, int]
"""Seconds ago, tokens per second, running jobs, waiting jobs."""


def escaped(value: object) -> str:
    """Text as HTML shows it, in elements and in attributes alike."""
    return escape(str(value), quote=True)


def fragment(
    status: FleetStatus | None,
    samples: Sequence[Sample],
    running: Sequence[RunningJob],
    *,
    span_s: float,
    trouble: str | None = None,
) -> str:
    """Everything inside the page's main element.

    Args:
        status: None: Redis has not answered yet.
        trouble: why what is shown is old.
    """
    warning = "" if trouble is None else f'<p class="trouble">{escaped(trouble)}</p>'
    if status is None:
        return warning or '<p class="none">looking for the fleet ...</p>'
    return "".join(
        (
            warning,
            _tiles(status),
            _charts(samples, span_s),
            _section("Workers", _workers(status.workers)),
            _section("Queues", _queues(status)),
            _section("Running jobs", _running(running, status.running)),
        )
    )


def _tiles(status: FleetStatus) -> str:
    tiles = (
        (f"{status.tokens_per_s:.0f}", "tokens/s", False),
        (len(status.workers), "workers", not status.workers),
        (status.slots_used, "slots used", False),
        (status.waiting, "waiting", False),
        (status.delayed, "delayed", False),
        (status.dead, "dead letters", status.dead > 0),
    )
    drawn = "".join(
        f"<li{' class=alert' if alert else ''}><b>{value}</b><span>{label}</span></li>"
        for value, label, alert in tiles
    )
    return f'<ul class="tiles">{drawn}</ul>'


def _charts(samples: Sequence[Sample], span_s: float) -> str:
    pace = [(ago, tokens) for ago, tokens, _, _ in samples]
    runs = [(ago, float(running)) for ago, _, running, _ in samples]
    waits = [(ago, float(waiting)) for ago, _, _, waiting in samples]
    throughput = plot(
        "Throughput, tokens/s",
        "tokens per second",
        [Series("throughput", "one", pace, filled=True)],
        span_s,
    )
    jobs = plot(
        "Jobs", "jobs", [Series("running", "one", runs), Series("waiting", "two", waits)], span_s
    )
    return f'<div class="charts"><section>{throughput}</section><section>{jobs}</section></div>'


def _section(title: str, body: str) -> str:
    """One that can be reached and moved by keyboard where the page is too narrow for it."""
    name = title.lower().replace(" ", "-")
    return (
        f'<section id="{name}" tabindex="0" role="region" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{title}</h2>{body}</section>'
    )


def _workers(workers: Sequence[WorkerLine]) -> str:
    rows = (
        (
            escaped(worker.worker),
            escaped(worker.model),
            _state(worker),
            _share(worker.running, worker.slots, worker.slots_used),
            DASH if worker.tokens_per_s is None else f"{worker.tokens_per_s:.1f}",
            DASH
            if worker.kv_usage is None
            else _share(worker.kv_usage, 1.0, f"{worker.kv_usage:.0%}"),
            f"{worker.seen_s:.0f} s ago",
        )
        for worker in workers
    )
    return _table(
        ("Worker", "Model", "State", "Slots", "#Tokens/s", "KV cache", "#Last seen"),
        rows,
        "No worker is running. Jobs wait for one.",
    )


def _queues(status: FleetStatus) -> str:
    rows = (
        (
            escaped(queue.model),
            escaped(queue.priority),
            queue.waiting,
            queue.front,
            queue.running,
            DASH if queue.oldest_s is None else duration(queue.oldest_s),
            f'<span class="dot">{trouble}</span>' if trouble else "open",
        )
        for queue in status.queues
        for trouble in (status.trouble_of(queue),)
    )
    return _table(
        ("Model", "Priority", "#Waiting", "#Handed back", "#Running", "#Oldest waits", "State"),
        rows,
        "No queue is there yet. The first job or worker makes one.",
    )


def _running(jobs: Sequence[RunningJob], total: int) -> str:
    rows = (
        (
            f'<span class="mono">{escaped(job.job_id)}</span>',
            escaped(job.model),
            escaped(job.priority),
            escaped(job.worker),
            job.attempt,
            job.offset,
            duration(job.age_s),
        )
        for job in jobs
    )
    table = _table(
        ("Job", "Model", "Priority", "Worker", "#Attempt", "#Tokens", "#Age"),
        rows,
        "No job is running.",
    )
    if total > len(jobs) == MOST_JOBS:
        table += f'<p class="none">the {len(jobs)} oldest of {total}</p>'
    return table


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> str:
    """Cells are HTML; a title that begins with # is of numbers."""
    numeric = [title.startswith("#") for title in titles]
    head = "".join(
        f'<th scope="col"{_class(n)}>{title.lstrip("#")}</th>' for title, n in zip(titles, numeric)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{_class(n)}>{cell}</td>' for cell, n in zip(row, numeric))}</tr>"
        for row in rows
    )
    if not body:
        return f'<p class="none">{empty}</p>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _class(numeric: bool) -> str:
    return ' class="n"' if numeric else ""


def _state(worker: WorkerLine) -> str:
    if worker.seen_s > STALE_S:
        return '<span class="dot stale">not heard of</span>'
    kind = " ready" if worker.state == "ready" else ""
    return f'<span class="dot{kind}">{escaped(worker.state)}</span>'


def _share(part: float, whole: float, label: str) -> str:
    """A bar with its figure beside it."""
    width = 0.0 if whole <= 0 else 100 * min(1.0, max(0.0, part / whole))
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="back" width="100" height="8"/>'
        f'<rect class="fill" width="{width:.0f}" height="8"/></svg>{label}'
    )
