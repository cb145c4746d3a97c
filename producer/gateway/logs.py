"""Log lines: one JSON object each, on standard error, with fields.

The standard library's logging is enough for one line a request; the light client has no other.

Invariant: a line holds what its `fields` hold and never what a job says; nothing here is given a
body.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

PACKAGE = "tokenfleet.producer.gateway"


class JsonLines(logging.Formatter):
    """A record as one JSON object: timestamp, level, event, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, without a line break."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "timestamp": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if not record.name.startswith(PACKAGE):
            line["logger"] = record.name
        if record.exc_info is not None and record.exc_info[0] is not None:
            # the text of an error may quote a prompt; where it happened does not
            line["exception"] = record.exc_info[0].__name__
            frames = traceback.extract_tb(record.exc_info[2])
            line["at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str = "info", output: TextIO | None = None) -> None:
    """Set up logging for this process. May be called again."""
    handler = logging.StreamHandler(output or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h.formatter, JsonLines)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(PACKAGE).setLevel(level.upper())
