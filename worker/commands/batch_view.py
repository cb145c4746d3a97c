"""What a batch looks like while it runs: a bar on a terminal, a line every ten seconds elsewhere.

All of it goes to standard error, so that standard output holds the summary alone.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenfleet.worker.commands import base

if TYPE_CHECKING:
    from tokenfleet.producer.batch import Batch, Glance, Progress, Summary

LINE_EVERY_S = 10.0
BAR_EVERY_S = 0.25
LOOK_EVERY_S = 0.5
FIGURES_WIDTH = 68
"""What all figures take beside a bar."""
SHORTEST_BAR = 8


class View(Protocol):
    """Shows a batch's progress."""

    def show(self, progress: Progress) -> None:
        """The batch is there now. Called more often than is worth showing."""


class LineView:
    """One line every ten seconds."""

    def __init__(self, every_s: float = LINE_EVERY_S) -> None:
        self._every_s = every_s
        self._next = time.monotonic() + every_s

    def show(self, progress: Progress) -> None:
        """See View."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            base.note(line_of(progress))


class BarView:
    """A bar of rich's on standard error."""

    def __init__(self, bar: Any, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("batch", total=total, **_fields(None))
        self._next = 0.0

    def show(self, progress: Progress) -> None:
        """See View."""
        now = time.monotonic()
        if now >= self._next or progress.done == progress.total:
            self._next = now + BAR_EVERY_S
            self._bar.update(self._task, completed=progress.done, **_fields(progress))


@contextmanager
def shown(total: int, *, plain: bool) -> Iterator[View]:
    """The view that fits standard error."""
    if plain or not sys.stderr.isatty():
        yield LineView()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    room = console.width - FIGURES_WIDTH
    columns = (
        *([BarColumn(min(40, room))] if room >= SHORTEST_BAR else []),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        *([TextColumn("{task.fields[running]} running")] if room >= 0 else []),
        *([TextColumn("{task.fields[rate]} tokens/s")] if room >= 0 else []),
        TextColumn("{task.fields[left]}"),
        TextColumn("[yellow]{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield BarView(bar, total)


async def follow(batch: Batch, *, plain: bool) -> Glance:
    """Show what the process at a batch writes down, as long as there is one."""
    from tokenfleet.producer.batch import Phase, Progress

    with shown(batch.state.lines, plain=plain) as view:
        while True:
            glance = await asyncio.to_thread(batch.glance)
            if not glance.busy:
                return glance
            if glance.progress:
                known = {**glance.progress, "phase": Phase(glance.progress["phase"])}
                view.show(Progress(**known))
            await asyncio.sleep(LOOK_EVERY_S)


def line_of(progress: Progress) -> str:
    """A progress as one line."""
    parts = [
        f"{progress.done} of {progress.total} done",
        f"{progress.failed} failed",
        f"{progress.running} running",
        f"{progress.tokens_per_s:.0f} tokens/s",
        _left(progress.left_s),
    ]
    return ", ".join([*parts, progress.note] if progress.note else parts)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """A summary as titles and texts."""
    failed = f", {summary.failed} failed" if summary.failed else ""
    why = ", ".join(f"{code} {count}" for code, count in sorted(summary.codes.items()))
    left = f", {summary.left} left" if summary.left else ""
    rows = [
        ("batch", f"{summary.batch}, {summary.phase}"),
        ("lines", f"{summary.completed} of {summary.total} completed{failed}{left}"),
    ]
    if why:
        rows.append(("failed", why))
    said = f"{summary.prompt_tokens} in, {summary.completion_tokens} out"
    if summary.tokens_per_s:
        said += f", {summary.tokens_per_s:.1f} tokens/s over {_span(summary.elapsed_s)}"
    rows.append(("tokens", said))
    rows.append(
        (
            "cost",
            f"{summary.worker_s:.1f} worker-seconds on {summary.workers} worker(s), "
            f"{summary.job_s:.1f} job-seconds",
        )
    )
    if summary.resubmitted:
        rows.append(("lost", f"{summary.resubmitted} job(s) that Redis had lost ran again"))
    rows += [
        (
            "slow" if number else "slowest",
            f"line {slow.line} [{slow.custom_id}]  {slow.run_s:.1f} s, {slow.tokens} tokens; "
            f"{slow.total_s:.1f} s with waiting",
        )
        for number, slow in enumerate(summary.slowest)
    ]
    rows.append(("output", summary.output))
    if summary.failed:
        rows.append(("errors", summary.errors))
    return rows


def glance_rows(glance: Glance) -> list[tuple[str, str]]:
    """A glance as titles and texts."""
    left = glance.total - glance.completed - glance.failed
    at_it = ", a process is at it" if glance.busy else ""
    if left and not glance.busy:
        at_it = f", no process is at it; go on with: tokenfleet batch resume {glance.output}"
    rows = [
        ("batch", f"{glance.batch}, {glance.phase}{at_it}"),
        (
            "lines",
            f"{glance.completed} of {glance.total} completed, {glance.failed} failed, {left} left",
        ),
    ]
    if glance.busy and glance.progress:
        progress = glance.progress
        rate = f"{progress['tokens_per_s']:.0f} tokens/s, {_left(progress['left_s'])}"
        rows.append(
            ("now", f"{progress['running']} running, {progress['waiting']} waiting, {rate}")
        )
    places = {"input": glance.source, "output": glance.output, "errors": glance.errors}
    return [*rows, *((name, str(Path(place).absolute())) for name, place in places.items())]


def _fields(progress: Progress | None) -> dict[str, Any]:
    if progress is None:
        return {"failed": 0, "running": 0, "rate": 0, "left": "", "note": ""}
    return {
        "failed": progress.failed,
        "running": progress.running,
        "rate": f"{progress.tokens_per_s:.0f}",
        "left": _left(progress.left_s),
        "note": progress.note or "",
    }


def _left(left_s: float | None) -> str:
    return "time left unknown" if left_s is None else f"{_span(left_s)} left"


def _span(seconds: float) -> str:
    """93784 -> 1d 2h, 125 -> 2m 5s, 4.2 -> 4s."""
    parts: list[str] = []
    rest = round(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
