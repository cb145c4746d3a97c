"""One sample of a request inside the engine.

A sequence is two numbers on a line of tokens: how many are known, how many are computed. Everything
a step does (prefill, decode, catching up after a preemption) moves `computed` towards `known`.

    tokens   [ prompt ............ | output ....... ]
             |<--- num_prompt ---->|
             |<------- num_computed ------->|  KV in the cache, or being written
             |<------- len(tokens) ------------->|
             |<------- num_known ---------------------->|  the last ones being sampled
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tokenfleet.engine.constraints import Constraint
from tokenfleet.engine.errors import InvariantBroken
from tokenfleet.engine.sampling_params import SamplingParams


class SequenceState(Enum):
    """Where a sequence is; MOVES says what may follow.

    NEW --> HELD --parent ready or gone--> WAITING --admitted--> RUNNING --end--> FINISHED
                                              ^---- preempted -----'
    """

    NEW = "new"
    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.NEW: frozenset(
        {SequenceState.HELD, SequenceState.WAITING, SequenceState.FINISHED}
    ),
    SequenceState.HELD: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sample; the scheduler owns everything but `tokens`, which the core appends
    to."""

    request_id: str
    choice: int
    tokens: list[int]
    """Prompt, then output. Grows only."""
    num_prompt: int
    max_len: int
    """Length at which it ends: prompt plus max_tokens, within the model's and the pool's limit."""
    order: tuple[int, int]
    """(priority, arrival): smaller runs first and is preempted last; unchanged by preemption."""
    params: SamplingParams
    seed: int
    """Of its noise, 64 bits."""
    ending: frozenset[int]
    """Tokens that end it."""
    constraint: Constraint | None = None
    """Grammar of its output, advanced over every token of it."""
    cache_context: int = 0
    """Root of its prefix chain: weights version, adapter and salt (see PrefixCache.context)."""
    use_cache: bool = True
    """False when every prompt position must be computed (prompt logprobs)."""
    parent: Sequence | None = None
    """Running sequence whose first `shared_limit` tokens are this one's too."""
    shared_limit: int = 0
    state: SequenceState = SequenceState.NEW
    num_computed: int = 0
    """Advanced when a step is scheduled, not when its result arrives."""
    num_done: int = 0
    """Computed by steps whose result has arrived: KV that others may copy."""
    plain: bool = field(init=False)
    """Whether it asks for tokens and nothing that has to be looked at for each of them."""
    looks_back: bool = field(init=False)
    """Whether what it may say next depends on its last token: a grammar, or words of several."""
    num_known: int = field(init=False)
    """Tokens that exist, those that a step in flight samples included."""
    last_step: int = 0
    """Number of the last step that touches its blocks or its slot."""
    block_table: list[int] = field(default_factory=list)
    num_owned: int = 0
    """Up to here its blocks are there and, from num_computed on, nobody else's: a step may write.
    Less than num_computed where that is not known."""
    slot: int = -1
    """Row of the running batch, -1 when it has none."""
    num_committed: int = 0
    """Leading blocks that the prefix cache knows."""
    last_node: int = 0
    """Prefix-cache node of the last committed block."""
    children: list[Sequence] = field(default_factory=list)
    """HELD until this sequence's prompt is computed."""

    def __post_init__(self) -> None:
        self.plain = self.constraint is None and self.params.prompt_logprobs is None
        words = any(len(word) > 1 for word in self.params.bad_word_ids)
        self.looks_back = words or self.constraint is not None
        self.num_known = len(self.tokens)

    @property
    def num_missing(self) -> int:
        """Tokens known and not computed."""
        return self.num_known - self.num_computed

    @property
    def must_wait(self) -> bool:
        """Whether its next step depends on a token that is being sampled: it has to be looked at,
        or the sequence ends with it."""
        if self.num_known == len(self.tokens):
            return False
        return self.looks_back or self.num_known >= self.max_len

    @property
    def num_output(self) -> int:
        """Output tokens that have arrived."""
        return len(self.tokens) - self.num_prompt

    def move(self, state: SequenceState) -> None:
        """Change state along MOVES.

        Raises:
            InvariantBroken: the move is not in the table.
        """
        if state not in MOVES[self.state]:
            raise InvariantBroken(
                f"sequence {self.request_id}/{self.choice}: {self.state.value} -> {state.value}"
            )
        self.state = state
