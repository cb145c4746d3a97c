"""What a request must be: it is refused by a typed error before anything is queued.

A field of another type would do its harm later and to others: one priority that is no number, and
nothing that waits can be put in order any more.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np

from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.scheduling.limits import Limits


def check_request(request: EngineRequest, vocab_size: int, max_len: int) -> None:
    """Refuse what the model cannot be asked.

    Raises:
        InvalidRequest: `empty_prompt`, `token_out_of_range`, `prompt_too_long`, `unsupported` or
            `invalid_parameter`.
    """
    _check_kinds(request)
    prompt, params = request.prompt_token_ids, request.params
    if not len(prompt):
        raise InvalidRequest("empty_prompt", "the prompt has no tokens; send at least one")
    _check_ids("prompt_token_ids", prompt, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for word in params.bad_words:
        if isinstance(word, str):
            raise InvalidRequest(
                "invalid_parameter", f"bad_words must be token ids by now, got {word!r:.50}"
            )
        _check_ids("bad_words", word, vocab_size)
    if len(prompt) > max_len:
        raise InvalidRequest(
            "prompt_too_long",
            f"the prompt has {len(prompt)} tokens and max_model_len is {max_len}; shorten it",
        )
    if params.structured_outputs is not None and params.min_tokens:
        raise InvalidRequest(
            "invalid_parameter",
            "min_tokens and structured_outputs contradict each other: the grammar decides where "
            "the output ends; leave min_tokens at 0",
        )
    _check_resume(request, vocab_size, max_len - len(prompt))


def kept(request: EngineRequest) -> EngineRequest:
    """The request with as much of its prompt as `truncate_prompt_tokens` keeps.

    Raises:
        InvalidRequest: a field of it is of another type.
    """
    _check_kinds(request)
    most = request.params.truncate_prompt_tokens
    if most is None or len(request.prompt_token_ids) <= most:
        return request
    return replace(request, prompt_token_ids=request.prompt_token_ids[-most:])


def _check_kinds(request: EngineRequest) -> None:
    """Refuse a request whose fields are not of their types."""
    prompt = request.prompt_token_ids
    if not _is_list(prompt):
        raise InvalidRequest("bad_prompt", f"a prompt is a list of token ids, got {prompt!r:.50}")
    if not isinstance(request.params, SamplingParams):
        raise InvalidRequest(
            "invalid_parameter", f"params must be SamplingParams, got {request.params!r:.50}"
        )
    wanted: tuple[tuple[str, bool, str], ...] = (
        ("id", isinstance(request.id, str), "a text"),
        ("priority", type(request.priority) is int, "an integer"),
        ("cache_salt", isinstance(request.cache_salt, str), "a text"),
        ("ended", isinstance(request.ended, Set), "a set of choices"),
        ("resume", _is_list(request.resume), "a list of outputs"),
    )
    for name, holds, kind in wanted:
        if not holds:
            value = getattr(request, name)
            raise InvalidRequest("invalid_parameter", f"{name} must be {kind}, got {value!r:.50}")


def _is_list(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Tokens) and not isinstance(value, (str, bytes))


def _check_resume(request: EngineRequest, vocab_size: int, room: int) -> None:
    """Refuse outputs so far that could not be this request's; `room` is left for one of them."""
    params = request.params
    if len(request.resume) > params.n:
        raise InvalidRequest(
            "invalid_parameter", f"resume has {len(request.resume)} outputs and n is {params.n}"
        )
    for output in request.resume:
        if not _is_list(output):
            raise InvalidRequest(
                "invalid_parameter", f"resume must have lists of token ids, got {output!r:.50}"
            )
        _check_ids("resume", output, vocab_size)
        if len(output) > min(room, room if params.max_tokens is None else params.max_tokens):
            raise InvalidRequest(
                "invalid_parameter",
                f"resume has an output of {len(output)} tokens, more than max_tokens or "
                f"max_model_len allow",
            )


def check_fits(max_len: int, limits: Limits, num_blocks: int) -> None:
    """Refuse a sequence that could never run to its end, however few run beside it.

    Raises:
        InvalidRequest: `never_fits`.
    """
    needed = limits.blocks_for(max_len)
    if needed > num_blocks:
        raise InvalidRequest(
            "never_fits",
            f"{max_len} tokens (prompt plus max_tokens) need {needed} KV blocks and the engine "
            f"has {num_blocks}; lower max_tokens or start it with more num_blocks",
        )


def longest(request: EngineRequest, max_len: int, pool_tokens: int) -> int:
    """Length at which the request's sequences end: what was asked for, within max_model_len.

    max_tokens None asks for as much as the model and the whole pool have room for.
    """
    prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens
    if wanted is None:
        return max(prompt, min(max_len, pool_tokens))
    return min(prompt + wanted, max_len)


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    plain = set(map(type, ids)) == {int}  # nearly all are: half the time of looking at each
    if plain and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token in ids:
        whole = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab_size:
            raise InvalidRequest(
                "token_out_of_range",
                f"{name} contains {token!r}; token ids of this model are 0 to {vocab_size - 1}",
            )
