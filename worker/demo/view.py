"""How the demo looks: a live table on a terminal, one line per piece of text in a pipe.

A view only shows; what is true is decided in worker/demo/show.py. Both views end with the same
table.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tokenfleet.producer import Event
    from tokenfleet.worker.demo.watched import Watched

PIECE = 56
"""Characters of text on one line of the plain view."""
PIPE_WIDTH = 120
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "white")
REFRESH_PER_S = 8


class View(Protocol):
    """What the demo tells whoever shows it."""

    def say(self, text: str, at_s: float) -> None: ...
    def shown(
        self, jobs: Sequence[Watched], elapsed: Callable[[], float]
    ) -> AbstractContextManager[None]: ...
    def submitted(self, job: Watched) -> None: ...
    def event(self, job: Watched, event: Event) -> None: ...
    def killed(self, worker: str, pid: int, jobs: Sequence[Watched]) -> None: ...
    def resumed(self, job: Watched) -> None: ...
    def finish(self, jobs: Sequence[Watched], trace_file: Path, elapsed_s: float) -> None: ...


class PlainView:
    """Lines as things happen: time, job, worker, offset, text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._elapsed: Callable[[], float] = lambda: 0.0
        self._held: dict[int, tuple[int, str]] = {}
        """Per job: offset of, and text that is not on a line yet."""

    def say(self, text: str, at_s: float) -> None:
        self._print(f"{at_s:6.2f}s  {text}")

    @contextmanager
    def shown(self, jobs: Sequence[Watched], elapsed: Callable[[], float]) -> Iterator[None]:
        self._elapsed = elapsed
        yield

    def submitted(self, job: Watched) -> None:
        self.say(f"[{job.number}] submitted: {job.prompt}", self._elapsed())

    def event(self, job: Watched, event: Event) -> None:
        offset, text = self._held.pop(job.number, (event.offset, ""))
        text += event.text
        while text:
            piece = _first_piece(text, whole=event.final)
            if not piece:
                self._held[job.number] = (offset, text)
                return
            self._line(job, offset, piece)
            text, offset = text[len(piece) :], event.offset
        if event.final:
            self.say(f"[{job.number}] done: {len(job.token_ids)} tokens", self._elapsed())

    def killed(self, worker: str, pid: int, jobs: Sequence[Watched]) -> None:
        hit = ", ".join(f"[{job.number}] at {len(job.token_ids)}" for job in jobs)
        self.say(f"*** SIGKILL {worker} (pid {pid}); its jobs: {hit}", self._elapsed())

    def resumed(self, job: Watched) -> None:
        self.say(
            f"*** [{job.number}] goes on at offset {job.resumed_at} on {job.workers[-1]}",
            self._elapsed(),
        )

    def finish(self, jobs: Sequence[Watched], trace_file: Path, elapsed_s: float) -> None:
        self._console.print(summary(jobs))
        self._print(closing(jobs, trace_file, elapsed_s))

    def _line(self, job: Watched, offset: int, text: str) -> None:
        worker = job.workers[-1] if job.workers else ""
        shown = " / ".join(line.strip() for line in text.split("\n") if line.strip())
        self._print(f"{self._elapsed():6.2f}s  [{job.number}] {worker:8} @{offset:<4}| {shown}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _first_piece(text: str, *, whole: bool) -> str:
    """Text for one line, cut at a space; empty when it is better to wait for more."""
    if len(text) <= PIECE:
        return text if whole else ""
    cut = text.rfind(" ", 1, PIECE)
    return text[: cut if cut > 0 else PIECE]


class LiveView:
    """A table that redraws itself, with what happened above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._jobs: Sequence[Watched] = ()
        self._elapsed: Callable[[], float] = lambda: 0.0

    def say(self, text: str, at_s: float) -> None:
        self._console.print(f"[dim]{at_s:6.2f}s[/]  {text}", highlight=False)

    @contextmanager
    def shown(self, jobs: Sequence[Watched], elapsed: Callable[[], float]) -> Iterator[None]:
        self._jobs, self._elapsed = jobs, elapsed
        with Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
        ):
            yield

    def submitted(self, job: Watched) -> None:
        """The table has it."""

    def event(self, job: Watched, event: Event) -> None:
        """The table has it."""

    def killed(self, worker: str, pid: int, jobs: Sequence[Watched]) -> None:
        hit = ", ".join(f"{job.number} at {len(job.token_ids)}" for job in jobs)
        self.say(f"[bold red]SIGKILL {worker}[/] (pid {pid}); its jobs: {hit}", self._elapsed())

    def resumed(self, job: Watched) -> None:
        self.say(
            f"[bold green]job {job.number} goes on[/] at offset {job.resumed_at} "
            f"on {job.workers[-1]}",
            self._elapsed(),
        )

    def finish(self, jobs: Sequence[Watched], trace_file: Path, elapsed_s: float) -> None:
        self._console.print(summary(jobs))
        self._console.print(closing(jobs, trace_file, elapsed_s), highlight=False)

    def _draw(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        for name, width in (("job", 3), ("worker", 9), ("tokens", 7)):
            table.add_column(name, width=width, no_wrap=True)
        table.add_column("text", ratio=1)
        width = max(20, self._console.width - 28)
        for job in self._jobs:
            colour = COLOURS[(job.number - 1) % len(COLOURS)]
            table.add_row(
                str(job.number),
                job.workers[-1] if job.workers else "waiting" if job.job else "",
                f"{len(job.token_ids)}{_mark(job)}",
                Text(_tail(job, width), style=colour if job.running else f"dim {colour}"),
            )
        made = sum(len(job.token_ids) for job in self._jobs)
        return Group(table, Text(f"{self._elapsed():.1f} s, {made} tokens", style="dim"))


def _mark(job: Watched) -> str:
    if job.faults:
        return " !"
    return " ok" if job.ended_at is not None else ""


def _tail(job: Watched, width: int) -> str:
    """The last two lines of the text, or the prompt while there is none."""
    if not job.text:
        return job.prompt if job.job else ""
    lines = textwrap.wrap(" ".join(job.text.split()), width) or [""]
    return "\n".join(lines[-2:])


def summary(jobs: Sequence[Watched]) -> Table:
    """What each job came to."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("job", "tokens", "TTFT", "tok/s", "attempts"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("workers", no_wrap=True)
    table.add_column("trace id", overflow="fold")
    for job in jobs:
        table.add_row(
            str(job.number),
            str(len(job.token_ids)),
            f"{job.ttft_s:.2f} s" if job.ttft_s is not None else "-",
            f"{job.tokens_per_s:.1f}" if job.tokens_per_s is not None else "-",
            str(job.attempt),
            _route(job),
            job.trace_id,
        )
    return table


def _route(job: Watched) -> str:
    if job.resumed_at is None:
        return ", ".join(job.workers)
    return f"{job.workers[0]} -> {job.workers[-1]} @{job.resumed_at}"


def closing(jobs: Sequence[Watched], trace_file: Path, elapsed_s: float) -> str:
    """The verdict, and where to look further."""
    tokens = sum(len(job.token_ids) for job in jobs)
    moved = sum(1 for job in jobs if job.resumed_at)
    faults = [f"job {job.number}: {fault}" for job in jobs for fault in job.faults]
    if faults:
        verdict = "FAILED: " + "; ".join(faults)
    else:
        jobs_went = "1 job" if moved == 1 else f"{moved} jobs"
        went_on = f"; {jobs_went} went on where the killed worker had stopped" if moved else ""
        verdict = f"{tokens} tokens of {len(jobs)} jobs, none missing, none twice{went_on}."
    return f"{verdict}\n{elapsed_s:.1f} s in all. Trace: {trace_file}"


class JsonView(PlainView):
    """What happens goes to standard error; the outcome to standard output, as one JSON object."""

    def __init__(self) -> None:
        super().__init__(Console(width=PIPE_WIDTH, stderr=True))

    def finish(self, jobs: Sequence[Watched], trace_file: Path, elapsed_s: float) -> None:
        outcome = {
            "jobs": [
                {
                    "job_id": job.job.id if job.job else None,
                    "tokens": len(job.token_ids),
                    "ttft_s": job.ttft_s,
                    "tokens_per_s": job.tokens_per_s,
                    "attempts": job.attempt,
                    "workers": job.workers,
                    "resumed_at": job.resumed_at,
                    "trace_id": job.trace_id,
                    "faults": job.faults,
                }
                for job in jobs
            ],
            "trace_file": str(trace_file),
            "elapsed_s": elapsed_s,
        }
        sys.stdout.write(json.dumps(outcome) + "\n")


def make_view(*, plain: bool = False) -> View:
    """Live where someone looks, plain in a pipe."""
    console = Console()
    if console.is_terminal and not plain:
        return LiveView(console)
    return PlainView(Console(width=PIPE_WIDTH))
