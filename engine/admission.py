"""What a request must be before the engine takes it, and the sequences it becomes.

A request is refused as a whole and before anything is queued.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens

import numpy as np

from tokenfleet.engine.constraints import Constraint
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.scheduling.sequence import Sequence


def check_request(request: EngineRequest, vocab_size: int, max_len: int) -> None:
    """Refuse what the model cannot be asked.

    Raises:
        InvalidRequest: `empty_prompt`, `token_out_of_range`, `prompt_too_long`, `unsupported` or
            `invalid_parameter`.
    """
    prompt, params = request.prompt_token_ids, request.params
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, (Tokens, np.ndarray)):
        raise InvalidRequest("bad_prompt", f"a prompt is a list of token ids, got {prompt!r:.50}")
    if not len(prompt):
        raise InvalidRequest("empty_prompt", "the prompt has no tokens; send at least one")
    _check_ids("prompt_token_ids", prompt, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
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
    if len(request.resume) > params.n:
        raise InvalidRequest(
            "invalid_parameter", f"resume has {len(request.resume)} outputs and n is {params.n}"
        )
    room = max_len - len(prompt)
    for output in request.resume:
        _check_ids("resume", output, vocab_size)
        if len(output) > min(room, room if params.max_tokens is None else params.max_tokens):
            raise InvalidRequest(
                "invalid_parameter",
                f"resume has an output of {len(output)} tokens, more than max_tokens or "
                f"max_model_len allow",
            )


def longest(request: EngineRequest, max_len: int, pool_tokens: int) -> int:
    """Length at which the request's sequences end: what was asked for, within max_model_len.

    max_tokens None asks for as much as the model and the whole pool have room for.
    """
    prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens
    if wanted is None:
        return max(prompt, min(max_len, pool_tokens))
    return min(prompt + wanted, max_len)


def ending_tokens(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that end an output: the caller's, and the model's unless ignored."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | frozenset(eos_token_ids)


def sequences_of(
    request: EngineRequest,
    *,
    max_len: int,
    arrival: int,
    seed: int,
    ending: frozenset[int],
    cache_context: int,
    constraint: Constraint | None = None,
) -> list[Sequence]:
    """One sequence per choice that has not ended; the first is the others' parent."""
    prompt = [int(token) for token in request.prompt_token_ids]
    sequences: list[Sequence] = []
    for choice in range(request.params.n):
        if choice in request.ended:
            continue
        done = request.resume[choice] if choice < len(request.resume) else ()
        sequences.append(
            Sequence(
                request_id=request.id,
                choice=choice,
                tokens=[*prompt, *done],
                num_prompt=len(prompt),
                max_len=max_len,
                order=(request.priority, arrival),
                params=request.params,
                seed=seed,
                ending=ending,
                constraint=_advanced(constraint, done),
                cache_context=cache_context,
                use_cache=request.params.prompt_logprobs is None or choice > 0,
                parent=sequences[0] if sequences else None,
                shared_limit=len(prompt),
            )
        )
    return sequences


def _advanced(constraint: Constraint | None, tokens: Iterable[int]) -> Constraint | None:
    """A constraint of its own for one output that already has these tokens.

    Raises:
        InvalidRequest: `unsupported_grammar` when the tokens are not of this grammar.
    """
    if constraint is None:
        return None
    own = constraint.copy()
    for token in tokens:
        wrong = own.accept(token)
        if wrong is not None:
            raise InvalidRequest("unsupported_grammar", f"the output cannot be resumed: {wrong}")
    return own


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        whole = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab_size:
            raise InvalidRequest(
                "token_out_of_range",
                f"{name} contains {token!r}; token ids of this model are 0 to {vocab_size - 1}",
            )
