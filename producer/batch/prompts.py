"""The prompt of a request: messages as the chat template takes them, or text, or token ids.

Invariant: what comes out holds texts only; a part that is no text is refused by its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenfleet.producer.batch.refusals import RequestRefused
from tokenfleet.producer.checks import are_token_ids

ROLES = {"developer": "system", "function": "tool"}
"""Names of roles that templates do not know, and the ones that they do."""

_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool", *ROLES})


def messages_of(value: object) -> list[dict[str, Any]]:
    """The messages of a chat, with text parts joined and `developer` named `system`.

    Raises:
        RequestRefused: naming the message.
    """
    if not isinstance(value, list):
        raise RequestRefused("invalid_type", "messages must be a list", "messages")
    if not value:
        raise RequestRefused("invalid_value", "messages must not be empty", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def prompt_of(value: object) -> dict[str, Any]:
    """submit's `prompt` or `prompt_token_ids`. A list with one prompt is that prompt.

    Raises:
        RequestRefused: also for several prompts: each has to be a request of its own.
    """
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise RequestRefused("invalid_value", "prompt must not be empty", "prompt")
        return {"prompt": value}
    if not isinstance(value, list):
        raise RequestRefused("invalid_type", "prompt must be a text or token ids", "prompt")
    if value and are_token_ids(value):
        return {"prompt_token_ids": value}
    if len(value) > 1 and all(isinstance(part, str | list) for part in value):
        raise RequestRefused(
            "unsupported_value", "several prompts: send a request for each", "prompt"
        )
    raise RequestRefused("invalid_value", "prompt must be a text or a list of token ids", "prompt")


def _message(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestRefused("invalid_type", f"{place} must be an object", place)
    role = message.get("role")
    if role is None:
        raise RequestRefused(
            "missing_required_parameter",
            f"missing required parameter: '{place}.role'",
            f"{place}.role",
        )
    if not isinstance(role, str) or role not in _KNOWN_ROLES:
        raise RequestRefused(
            "invalid_value",
            f"{place}.role must be one of {', '.join(sorted(_KNOWN_ROLES))}, got {role!r:.40}",
            f"{place}.role",
        )
    if message.get("content") is None and not message.get("tool_calls"):
        place += ".content"
        raise RequestRefused(
            "missing_required_parameter", f"missing required parameter: '{place}'", place
        )
    kept = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    text = "" if content is None else _text(content, f"{place}.content")
    return {**kept, "role": ROLES.get(role, role), "content": text}


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused("invalid_type", f"{place} must be a text or a list of parts", place)
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, Mapping) or "type" not in part:
        raise RequestRefused("invalid_type", f"{place} must be an object with a type", place)
    if part["type"] not in ("text", "refusal"):
        raise RequestRefused(
            "unsupported_value",
            f"{place}.type must be 'text', got {part['type']!r:.40}: only text can be read here",
            f"{place}.type",
        )
    text = part.get(part["type"])
    if not isinstance(text, str):
        place += f".{part['type']}"
        raise RequestRefused("invalid_type", f"{place} must be a text", place)
    return text
