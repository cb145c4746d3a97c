"""The two forms of a batch file's lines, each made into the same task.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}    openai
    {"prompt": "...", "max_tokens": 9}  {"id": "a", "messages": [...]}  "a prompt"        prompts

Invariant: a task has a custom_id that can be written back, a url, and a body.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from tokenfleet.producer.batch.lines import RawLine
from tokenfleet.producer.batch.refusals import RequestRefused
from tokenfleet.producer.batch.responses import CHAT, COMPLETIONS

MAX_CUSTOM_ID = 512
_FIELDS = ("custom_id", "method", "url", "body")


class Form(StrEnum):
    """How a file's lines are to be read."""

    AUTO = "auto"
    """As its first line looks."""
    OPENAI = "openai"
    PROMPTS = "prompts"


@dataclass(frozen=True, slots=True)
class Task:
    """One line, taken apart."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


class LineRefused(RequestRefused):
    """A line is not what it should be; `custom_id` where it has one all the same."""

    def __init__(
        self, code: str, message: str, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(code, message, param)
        self.custom_id = custom_id


def decode(line: RawLine, max_line_bytes: int) -> Any:
    """The line's JSON value.

    Raises:
        LineRefused: `invalid_json_line`, with the place of the fault.
    """
    if line.too_long:
        raise _no_json(f"the line is longer than {max_line_bytes} bytes")
    if not line.raw.strip():
        raise _no_json("the line is blank")
    try:
        text = line.raw.decode()
        value = _DECODER.decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be sent
    except UnicodeDecodeError as error:
        raise _no_json(f"the line is not UTF-8: byte {error.start + 1} is {error.reason}") from None
    except UnicodeEncodeError:
        raise _no_json("the line has half a surrogate pair (\\ud800 to \\udfff)") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"the line is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _no_json(f"the line is not JSON that can be read: {error}") from None
    return value


def form_of(value: object) -> Form:
    """How the file looks, by its first line that is JSON."""
    if isinstance(value, str):
        return Form.PROMPTS
    if isinstance(value, dict) and not value.keys() & {"body", "url", "method"}:
        return Form.PROMPTS if value.keys() & {"prompt", "messages"} else Form.OPENAI
    return Form.OPENAI


def read_task(value: object) -> Task:
    """A line of the OpenAI Batch API. Raises LineRefused."""
    if not isinstance(value, dict):
        raise _no_json(f"the line must be a JSON object, got {_kind(value)}")
    custom_id = _custom_id(value.get("custom_id"))
    for name in _FIELDS:
        if value.get(name) is None:
            raise LineRefused(
                "missing_required_parameter",
                f"missing required parameter: {name!r}",
                name,
                custom_id,
            )
    for name in value.keys() - set(_FIELDS):
        raise LineRefused(
            "unknown_parameter", f"unknown parameter beside the body: {name!r:.80}", name, custom_id
        )
    if value["method"] != "POST":
        raise LineRefused(
            "invalid_method",
            f"method must be POST, got {value['method']!r:.40}",
            "method",
            custom_id,
        )
    if not isinstance(value["url"], str):
        raise LineRefused("invalid_type", "url must be a text", "url", custom_id)
    if not isinstance(value["body"], dict):
        raise LineRefused("invalid_type", "body must be a JSON object", "body", custom_id)
    return Task(custom_id, value["url"], value["body"])


def read_prompt(value: object, number: int, *, raw: bool) -> Task:
    """A line of a file of prompts; without an id its number names it. Raises LineRefused."""
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise _no_json(f"the line must be a JSON object or a text, got {_kind(value)}")
    body = dict(value)
    given = body.pop("custom_id", body.pop("id", None))
    custom_id = f"line-{number}" if given is None else _custom_id(given)
    if ("prompt" in body) == ("messages" in body):
        raise LineRefused(
            "missing_required_parameter",
            "give a prompt or messages, one of them",
            "prompt",
            custom_id,
        )
    if "messages" in body:
        return Task(custom_id, CHAT, body)
    if raw:
        return Task(custom_id, COMPLETIONS, body)
    said = body.pop("prompt")
    if not isinstance(said, str) or not said:
        raise LineRefused("invalid_type", "prompt must be a text", "prompt", custom_id)
    return Task(custom_id, CHAT, {**body, "messages": [{"role": "user", "content": said}]})


def _custom_id(value: object) -> str:
    if value is None:
        raise LineRefused(
            "missing_required_parameter", "missing required parameter: 'custom_id'", "custom_id"
        )
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_CUSTOM_ID:
        raise LineRefused(
            "invalid_custom_id",
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters, got {value!r:.80}",
            "custom_id",
        )
    return value


def _no_json(message: str) -> LineRefused:
    return LineRefused("invalid_json_line", message)


def _kind(value: object) -> str:
    names = {list: "an array", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
