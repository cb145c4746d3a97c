"""What a request must be before the engine takes it, and the sequences it becomes.

A request is refused as a whole and before anything is queued. One with a grammar is opened only
when that is compiled, and checked again then; until its sequences wait it is known here alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np

from tokenfleet.engine.accounts import Accounts
from tokenfleet.engine.compiling import Compiling
from tokenfleet.engine.constraints import Constraint
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.execution.loading import Vocabulary
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.scheduling.limits import Limits
from tokenfleet.engine.scheduling.scheduler import Scheduler
from tokenfleet.engine.scheduling.sequence import Sequence


class Admission:
    """Takes requests, and opens them in the accounts.

    Args:
        max_len: of a sequence: max_model_len.
        compiling: where requests wait for their grammar.
        seed: of the seeds that requests without one get; None = another each time.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_len: int,
        *,
        accounts: Accounts,
        scheduler: Scheduler,
        compiling: Compiling,
        seed: int | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._max_len = max_len
        self._accounts = accounts
        self._scheduler = scheduler
        self._compiling = compiling
        self._arrivals = 0
        self._random = random.Random(seed)

    def add(self, request: EngineRequest) -> None:
        """Open a request, or begin to compile its grammar.

        Raises:
            InvalidRequest: with a code and what to do; nothing was queued.
        """
        max_len = self._check(request)
        if request.params.structured_outputs is None:
            self._open(request, max_len)
        else:
            self._compiling.start(request)

    def fork(
        self, request_id: str, new_id: str, params: SamplingParams | None, choice: int
    ) -> None:
        """Take a request whose prompt is all tokens of a running one so far; see EngineCore.fork.

        Raises:
            InvalidRequest: `unknown_id` when the choice is not running; else as `add`.
        """
        source, parent = self._accounts.running_choice(request_id, choice)
        request = replace(
            source,
            id=new_id,
            prompt_token_ids=tuple(parent.tokens),
            params=params or source.params,
            resume=(),
            ended=frozenset(),
        )
        max_len = self._check(request)
        if params is None or params.structured_outputs is None:
            self._open(request, max_len, parent.constraint if params is None else None, parent)
        else:
            self._compiling.start(request)

    def open_compiled(self, *, idle: bool) -> None:
        """Open the requests whose grammar is ready; wait a moment for one when idle."""
        for request, constraint in self._compiling.ready(wait_for_one=idle):
            try:
                if isinstance(constraint, InvalidRequest):
                    raise constraint
                self._open(request, self._check(request), constraint)
            except InvalidRequest as refusal:
                self._accounts.refuse(request, refusal)

    def cache_context(self, request: EngineRequest) -> int:
        """Root of the prefixes that the request's sequences may share from now on."""
        cache = self._scheduler.cache
        if cache is None:
            return 0
        version = self._accounts.weights_version
        return cache.context(weights_version=version, salt=request.cache_salt)

    def _check(self, request: EngineRequest) -> int:
        """Refuse a request, or tell the length at which its sequences end."""
        if request.id in self._accounts or request.id in self._compiling:
            raise InvalidRequest("duplicate_id", f"a request {request.id!r} is running already")
        check_request(request, self._vocabulary.vocab_size, self._max_len)
        num_blocks, limits = self._scheduler.pool.num_blocks, self._scheduler.limits
        max_len = longest(request, self._max_len, num_blocks * limits.block_size)
        check_fits(max_len, limits, num_blocks)
        return max_len

    def _open(
        self,
        request: EngineRequest,
        max_len: int,
        constraint: Constraint | None = None,
        parent: Sequence | None = None,
    ) -> None:
        self._arrivals += 1
        seed = request.params.seed
        sequences = sequences_of(
            request,
            max_len=max_len,
            arrival=self._arrivals,
            seed=self._random.getrandbits(64) if seed is None else seed % 2**64,
            ending=request.params.ending_tokens(self._vocabulary.eos_token_ids),
            cache_context=self.cache_context(request),
            constraint=constraint,
        )
        if parent is not None and sequences:
            sequences[0].parent, sequences[0].shared_limit = parent, parent.num_done
        self._accounts.open(request, sequences)


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
