"""Log lines: their fields, their shape, and what never stands in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import structlog

from tokenfleet.worker.observing import logs

Lines = Callable[[], list[dict[str, Any]]]


@contextmanager
def configured(**options: Any) -> Iterator[None]:
    """Logging set up for a while, and then as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logs.configure(**options)
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def log_to_json() -> Iterator[Callable[..., Lines]]:
    with ExitStack() as stack:

        def configure(**options: Any) -> Lines:
            output = io.StringIO()
            stack.enter_context(configured(log_format="json", output=output, **options))
            return lambda: [json.loads(line) for line in output.getvalue().splitlines()]

        yield configure


def test_a_line_is_an_event_with_fields(log_to_json: Callable[..., Lines]) -> None:
    lines = log_to_json(worker="w1")
    structlog.get_logger().info("job_claimed", job_id="j", attempt=2)
    (line,) = lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "job_claimed",
        "level": "info",
        "worker": "w1",
        "job_id": "j",
        "attempt": 2,
    }


def test_a_line_about_a_job_carries_its_trace(log_to_json: Callable[..., Lines]) -> None:
    known = {("j", 2): {"trace_id": "t", "span_id": "s"}}
    lines = log_to_json(trace_ids=lambda job, attempt: known.get((job, attempt), {}))
    log = structlog.get_logger()
    log.info("job_claimed", job_id="j", attempt=2)
    log.info("job_claimed", job_id="other", attempt=1)
    log.info("started")
    first, other, started = lines()
    assert (first["trace_id"], first["span_id"]) == ("t", "s")
    assert "trace_id" not in other
    assert "trace_id" not in started


@pytest.mark.parametrize("name", sorted(logs.WITHHELD))
def test_what_a_job_says_is_withheld(log_to_json: Callable[..., Lines], name: str) -> None:
    lines = log_to_json()
    structlog.get_logger().warning("job_refused", **{name: "my secret"})
    (line,) = lines()
    assert line[name] == "<9 withheld>"
    assert "secret" not in json.dumps(line)


def test_lines_below_the_level_are_not_written(log_to_json: Callable[..., Lines]) -> None:
    lines = log_to_json(level="warning")
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines()] == ["loud"]


def test_a_librarys_line_has_the_same_shape_and_is_said_once_a_minute(
    log_to_json: Callable[..., Lines],
) -> None:
    lines = log_to_json(worker="w1")
    library = logging.getLogger("opentelemetry.exporter")
    for _ in range(3):
        library.error("Failed to export %s", "spans")
    library.info("all is well")
    (line,) = lines()
    assert line["event"] == "Failed to export spans"
    assert line["logger"] == "opentelemetry.exporter"
    assert line["worker"] == "w1"


def test_a_repeated_line_comes_again_after_a_minute() -> None:
    now = [0.0]
    once = logs.OncePerMinute(clock=lambda: now[0])
    record = logging.LogRecord("lib", logging.ERROR, "", 0, "away", None, None)
    assert once.filter(record)
    assert not once.filter(record)
    now[0] = logs.REPEAT_S
    assert once.filter(record)


def test_configuring_twice_writes_each_line_once(log_to_json: Callable[..., Lines]) -> None:
    log_to_json()
    lines = log_to_json()
    logging.getLogger("lib").error("away")
    structlog.get_logger().info("started")
    assert len(lines()) == 2


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_does_not_show_local_variables(log_format: str) -> None:
    output = io.StringIO()
    with configured(log_format=log_format, output=output):
        prompt = "my " + "secret"
        try:
            raise KeyError(len(prompt))
        except KeyError:
            structlog.get_logger().exception("loop_failed")
    assert "KeyError" in output.getvalue()
    assert "my secret" not in output.getvalue()


def test_an_exception_is_one_line(log_to_json: Callable[..., Lines]) -> None:
    lines = log_to_json()
    try:
        raise KeyError("gone")
    except KeyError:
        structlog.get_logger().exception("loop_failed")
    (line,) = lines()
    assert line["exception"][0]["exc_type"] == "KeyError"


def test_people_get_words_and_not_json() -> None:
    output = io.StringIO()
    with configured(log_format="console", output=output):
        structlog.get_logger().info("job_claimed", job_id="j")
    assert "job_claimed" in output.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(output.getvalue())


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"log format must be one of .* got 'xml'"):
        logs.configure(log_format="xml")
