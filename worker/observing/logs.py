"""Log lines: events with fields, one line per fact, as JSON for machines or coloured for people.

What a job says never reaches a log: prompts, messages, texts and token ids are withheld here,
whoever logs them. Lines about a job carry its trace ids, so that a log leads to its trace.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO

import structlog
import structlog.tracebacks

FORMATS = ("auto", "json", "console")
WITHHELD = frozenset(
    {"prompt", "messages", "text", "token_ids", "prompt_token_ids", "request", "result"}
)
REPEAT_S = 60.0
"""How long the same line of a library is said only once."""

TraceIds = Callable[[str, int], Mapping[str, str]]


def configure(
    *,
    level: str = "info",
    log_format: str = "auto",
    worker: str | None = None,
    trace_ids: TraceIds | None = None,
    output: TextIO | None = None,
) -> None:
    """Set up structlog and the standard library's logging for this process. May be called again.

    Args:
        level: debug, info, warning or error.
        log_format: json, console, or auto: console where the output is a terminal.
        worker: this worker's id, on every line.
        trace_ids: (job id, attempt) -> trace_id and span_id (telemetry.py: trace_ids).
        output: standard error when not given.
    """
    if log_format not in FORMATS:
        raise ValueError(f"log format must be one of {FORMATS}, got {log_format!r}")
    stream = output or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _WorkerFields(worker, trace_ids),
        withhold,
    ]
    as_json = log_format == "json" or (log_format == "auto" and not stream.isatty())
    structlog.configure(
        processors=[
            *shared,
            structlog.processors.StackInfoRenderer(),
            *_rendering(stream, as_json=as_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    _route_standard_logging(stream, number, shared, as_json=as_json)


def _rendering(stream: TextIO, *, as_json: bool) -> list[structlog.typing.Processor]:
    """How a line ends up as text; a traceback never shows local variables, which hold prompts."""
    if as_json:
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [
            structlog.processors.ExceptionRenderer(transformer),
            structlog.processors.JSONRenderer(),
        ]
    renderer = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(), pad_event_to=24, exception_formatter=structlog.dev.plain_traceback
    )
    return [renderer]


def _route_standard_logging(
    stream: TextIO, level: int, shared: list[structlog.typing.Processor], *, as_json: bool
) -> None:
    """Libraries log through the standard library;

    their lines get the same shape, warnings and up.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(stream, as_json=as_json),
            ],
        )
    )
    handler.addFilter(OncePerMinute())
    root = logging.getLogger()
    for old in [h for h in root.handlers if getattr(h, "is_tokenfleet", False)]:
        root.removeHandler(old)
    handler.is_tokenfleet = True  # type: ignore[attr-defined]  # how a second call finds the first's
    root.addHandler(handler)
    root.setLevel(max(level, logging.WARNING))


class _WorkerFields:
    """Adds the worker's id, and a job's trace ids to lines that name the job."""

    def __init__(self, worker: str | None, trace_ids: TraceIds | None) -> None:
        self._worker = worker
        self._trace_ids = trace_ids

    def __call__(
        self, _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if self._worker:
            event.setdefault("worker", self._worker)
        job_id, attempt = event.get("job_id"), event.get("attempt")
        if self._trace_ids and job_id is not None and attempt is not None:
            event.update(self._trace_ids(job_id, attempt))
        return event


def withhold(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Replace what a job says by its length."""
    for name in WITHHELD & event.keys():
        value = event[name]
        size = len(value) if hasattr(value, "__len__") else 1
        event[name] = f"<{size} withheld>"
    return event


class OncePerMinute(logging.Filter):
    """Lets a library's line through once in REPEAT_S:

    a collector that is away is one line, not one a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)), self._clock()
        if len(self._said) > 1000:
            self._said.clear()
        if now - self._said.get(key, -REPEAT_S) < REPEAT_S:
            return False
        self._said[key] = now
        return True
