"""The two request bodies that are understood, field by field.

A field that is not named here is refused: one that is silently dropped gives answers that nobody
asked for. `IGNORED` are the exceptions: they say nothing about the answer itself.

Invariant: a body that passed has every field at its type; ranges are SamplingParams' own to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tokenfleet.producer.batch.refusals import RequestRefused

IGNORED: Mapping[str, type] = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), str),
    **dict.fromkeys(("prompt_cache_retention", "service_tier"), str),
    **dict.fromkeys(("store", "parallel_tool_calls"), bool),
}
"""Accepted at their type, and without effect on the answer."""

TIERS = ("auto", "default", "flex", "priority", "scale")
"""What service_tier may be."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
}
"""Accepted at these values only, where they change nothing."""

UNSUPPORTED = frozenset(
    {"audio", "prediction", "reasoning_effort", "verbosity", "web_search_options", "moderation"}
    | {
        "thinking",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "use_beam_search",
    }
    | {"length_penalty", "best_of", "echo", "suffix", "tools", "functions", "tool_choice"}
    | {"function_call", "modalities"}
)
"""Known to OpenAI or to vLLM, and not to tokenfleet."""


class StreamOptions(BaseModel):
    """How a stream is to look."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    include_usage: bool = False
    include_obfuscation: bool = False
    """Taken, and nothing is padded: no part of an answer rests on it."""


class JsonSchema(BaseModel):
    """The named schema of a response_format."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    name: str = "schema"
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """text, any JSON object, or JSON by a schema."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True
    )

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop: Any = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    metadata: dict[str, str] = Field(default_factory=dict)
    response_format: ResponseFormat | None = None

    min_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    structured_outputs: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str | list[int]] = Field(default_factory=list)
    truncate_prompt_tokens: int | None = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Any
    logprobs: int | None = None
    max_tokens: int | None = 16


def read_body(kind: type[Body], body: object) -> Any:
    """The body as its model. Null is the same as absent, as in the API.

    Raises:
        RequestRefused: naming the first field that is wrong.
    """
    if not isinstance(body, Mapping):
        raise RequestRefused("invalid_type", "the body must be a JSON object")
    given = {}
    for name, value in body.items():
        if name in NEUTRAL and name not in kind.model_fields:
            if value is not None and value not in NEUTRAL[name]:
                raise _unsupported(name)
        elif value is not None and name in IGNORED:
            _check_ignored(name, value)
        elif value is not None:
            given[name] = value
    if given.get("best_of") == given.get("n", 1):
        given.pop("best_of", None)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None


def _check_ignored(name: str, value: object) -> None:
    kind = IGNORED[name]
    if not isinstance(value, kind):
        wanted = "true or false" if kind is bool else "a text"
        raise RequestRefused("invalid_type", f"invalid {name!r}: must be {wanted}", name)
    if name == "service_tier" and value not in TIERS:
        known = ", ".join(TIERS)
        raise RequestRefused("invalid_value", f"invalid {name!r}: must be one of {known}", name)


def _refusal(error: ValidationError) -> RequestRefused:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = where(problem["loc"])
    if problem["type"] == "extra_forbidden":
        if param in UNSUPPORTED:
            return _unsupported(param)
        return RequestRefused("unknown_parameter", f"unknown parameter: {param!r}", param)
    if problem["type"] == "missing":
        return RequestRefused(
            "missing_required_parameter", f"missing required parameter: {param!r}", param
        )
    wrong_type = problem["type"].endswith("_type")
    code = "invalid_type" if wrong_type else "invalid_value"
    return RequestRefused(code, f"invalid {param!r}: {_lowered(problem['msg'])}", param)


def _unsupported(name: str) -> RequestRefused:
    return RequestRefused(
        "unsupported_parameter", f"{name!r} is not supported here; leave it out", name
    )


def where(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
