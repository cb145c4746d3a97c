"""What a request must be before the engine takes it, and the sequences it becomes.

A request is refused as a whole and before anything is queued. One with a grammar is opened only
when that is compiled, and checked again then; until its sequences wait it is known here alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from tokenfleet.engine.accounts import Accounts
from tokenfleet.engine.compiling import Compiling
from tokenfleet.engine.constraints import Constraint
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.execution.loading import Vocabulary
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.request_checks import check_fits, check_request, kept, longest
from tokenfleet.engine.sampling_params import SamplingParams
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
        request = kept(request)
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
        check_request(request, self._vocabulary.vocab_size, self._max_len)
        if request.id in self._accounts or request.id in self._compiling:
            raise InvalidRequest("duplicate_id", f"a request {request.id!r} is running already")
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
