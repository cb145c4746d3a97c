"""From a job's result to an OpenAI response body.

A client has no tokenizer: where the API names tokens by their text, `token_id:<id>` stands here,
and `bytes` is null. What only tokenfleet knows is under `tokenfleet`.

Invariant: a body holds what JSON has, and nothing of the request's prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenfleet.producer.protocol import Choice, JobResult, Usage

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)

IMPOSSIBLE = -9999.0
"""The logprob of a token that cannot come, as OpenAI writes it: JSON has no infinity."""

Logprobs = Sequence[Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What must be known of a request to shape its response."""

    endpoint: str
    model: str
    """As the caller named it."""
    logprobs: int | None = None
    """Alternatives to show with each token; None: no logprobs."""

    @property
    def is_chat(self) -> bool:
        """Whether choices are messages."""
        return self.endpoint == CHAT

    def body(
        self,
        result: JobResult,
        *,
        job_id: str,
        created_s: int,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response as the endpoint gives it when it does not stream."""
        choice_of = self._message if self.is_chat else self._text
        choices = [choice_of(index, choice) for index, choice in enumerate(result.choices)]
        body: dict[str, Any] = {
            "id": self.response_id(job_id),
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": created_s,
            "model": self.model,
            "choices": choices,
            "usage": usage_of(result.usage),
        }
        if result.prompt_logprobs is not None:
            body["prompt_logprobs"] = [
                None
                if entry is None
                else {str(token): _finite(value) for token, value in entry.items()}
                for entry in result.prompt_logprobs
            ]
        return body if extra is None else {**body, "tokenfleet": dict(extra)}

    def response_id(self, job_id: str) -> str:
        """The id of a response, from which the job's can be read."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{job_id}"

    def shaped_logprobs(
        self, token_ids: Sequence[int], logprobs: Logprobs | None
    ) -> dict[str, Any] | None:
        """The logprobs object of one choice, or of the new tokens of one event."""
        if self.logprobs is None or logprobs is None:
            return None
        rows = list(zip(token_ids, logprobs))
        if self.is_chat:
            content = [_chat_token(token, row, self.logprobs) for token, row in rows]
            return {"content": content, "refusal": None}
        return {
            "tokens": [_name(token) for token, _ in rows],
            "token_logprobs": [_finite(row[token]) for token, row in rows],
            "top_logprobs": [
                {_name(other): _finite(value) for other, value in _top(row, self.logprobs)}
                for _, row in rows
            ],
            "text_offset": None,
        }

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self.shaped_logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _text(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": self.shaped_logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }


def usage_of(usage: Usage) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chat_token(token: int, row: Mapping[int, float], count: int) -> dict[str, Any]:
    top = [
        {"token": _name(other), "bytes": None, "logprob": _finite(value)}
        for other, value in _top(row, count)
    ]
    chosen = _finite(row[token])
    return {"token": _name(token), "bytes": None, "logprob": chosen, "top_logprobs": top}


def _top(row: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """The likeliest `count`; the chosen token may not be among them."""
    return sorted(row.items(), key=lambda entry: (-entry[1], entry[0]))[:count]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def _name(token: int) -> str:
    return f"token_id:{token}"
