"""From an OpenAI request body to the arguments of `submit`.

Invariant: what is returned can be submitted: every value was checked by the class that owns it, so
that a refusal comes before anything is sent, with the name that the caller used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenfleet.producer.batch.bodies import Body, ChatBody, CompletionBody, read_body
from tokenfleet.producer.batch.prompts import messages_of, prompt_of
from tokenfleet.producer.batch.refusals import RequestRefused
from tokenfleet.producer.batch.responses import CHAT, COMPLETIONS, ENDPOINTS, ResponseShape
from tokenfleet.producer.errors import InvalidJob
from tokenfleet.producer.sampling_params import SamplingParams

_SAME_NAME = (
    *("temperature", "top_p", "n", "seed", "presence_penalty", "frequency_penalty", "min_tokens"),
    *("top_k", "min_p", "repetition_penalty", "ignore_eos", "include_stop", "skip_special_tokens"),
    *("prompt_logprobs", "logprobs_mode", "allowed_token_ids", "bad_words"),
    "truncate_prompt_tokens",
)


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """One OpenAI request, ready for `client.submit(**request.job)`."""

    job: Mapping[str, Any] = field(repr=False)
    """submit's model, sampling, metadata, and messages, prompt or prompt_token_ids."""
    shape: ResponseShape
    """Makes the response body from the job's result."""
    stream: bool = False
    include_usage: bool = False
    """stream_options.include_usage."""

    @property
    def model(self) -> str:
        """The model asked for."""
        return self.shape.model


def translate_request(
    endpoint: str, body: object, *, model: str | None = None, streams: bool = False
) -> TranslatedRequest:
    """Read a request body strictly.

    Args:
        endpoint: `/v1/chat/completions` or `/v1/completions`.
        body: the decoded JSON.
        model: runs the request whatever model its body names.
        streams: whether `stream: true` is allowed; where not, it is refused.

    Raises:
        RequestRefused: code, message and param of the first thing that cannot be done.
    """
    if endpoint not in ENDPOINTS:
        known = " or ".join(ENDPOINTS)
        raise RequestRefused("invalid_url", f"url must be {known}, got {endpoint!r:.60}", "url")
    if model is not None and isinstance(body, Mapping):
        body = {**body, "model": model}
    if endpoint == CHAT:
        chat: ChatBody = read_body(ChatBody, body)
        prompt: dict[str, Any] = {"messages": messages_of(chat.messages)}
        return _translated(CHAT, chat, prompt, _chat_limits(chat), streams=streams)
    plain: CompletionBody = read_body(CompletionBody, body)
    limits = {"max_tokens": plain.max_tokens, "logprobs": plain.logprobs}
    return _translated(COMPLETIONS, plain, prompt_of(plain.prompt), limits, streams=streams)


def _translated(
    endpoint: str, body: Body, prompt: dict[str, Any], limits: dict[str, Any], *, streams: bool
) -> TranslatedRequest:
    if body.stream and not streams:
        raise RequestRefused(
            "unsupported_value", "stream must be false: nobody reads along here", "stream"
        )
    if not 1 <= len(body.model) <= 256 or not body.model.isprintable():
        raise RequestRefused(
            "invalid_value", "model must be a name of 1 to 256 characters", "model"
        )
    job = {"model": body.model, "sampling": _sampling(body, limits), **prompt}
    if body.metadata:
        job["metadata"] = body.metadata
    return TranslatedRequest(
        job,
        ResponseShape(endpoint, body.model, limits["logprobs"]),
        stream=body.stream,
        include_usage=body.stream_options.include_usage,
    )


def _chat_limits(body: ChatBody) -> dict[str, Any]:
    """max_tokens and logprobs, which chat spells in its own way."""
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        raise RequestRefused(
            "invalid_value",
            "max_tokens and max_completion_tokens contradict each other; give one",
            "max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestRefused("invalid_value", "top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return {"max_tokens": next(iter(given), None), "logprobs": logprobs}


def _sampling(body: Body, limits: dict[str, Any]) -> SamplingParams:
    values = {name: getattr(body, name) for name in _SAME_NAME}
    try:
        return SamplingParams(
            **values,
            **limits,
            stop=() if body.stop is None else body.stop,
            stop_token_ids=tuple(body.stop_token_ids),
            logit_bias=_bias(body.logit_bias),
            structured_outputs=_structured(body),
        )
    except InvalidJob as error:
        raise RequestRefused("invalid_value", str(error), _name_of(error.field, body)) from None


def _name_of(name: str, body: Body) -> str:
    """A sampling parameter as the caller called it."""
    if isinstance(body, ChatBody):
        if name == "logprobs":
            return "top_logprobs"
        if name == "max_tokens" and body.max_tokens is None:
            return "max_completion_tokens"
    return name


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise RequestRefused(
            "invalid_value", "logit_bias must have token ids as keys", "logit_bias"
        ) from None


def _structured(body: Body) -> dict[str, Any] | None:
    """The grammar that a response_format or structured_outputs asks for."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return body.structured_outputs
    if body.structured_outputs is not None:
        raise RequestRefused(
            "invalid_value",
            "response_format and structured_outputs contradict each other; give one",
            "response_format",
        )
    if wanted.type == "json_object":
        return {"json": {"type": "object"}}
    if wanted.json_schema is None:
        place = "response_format.json_schema"
        raise RequestRefused(
            "missing_required_parameter", f"missing required parameter: '{place}'", place
        )
    return {"json": wanted.json_schema.schema_}
