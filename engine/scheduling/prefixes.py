"""What a waiting sequence need not compute: known prefixes, from a running parent or the cache.

Invariant: at least one token of a sequence is left to compute, as a step must produce logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenfleet.engine.scheduling.limits import Limits
from tokenfleet.engine.scheduling.prefix_cache import PrefixCache, token_key
from tokenfleet.engine.scheduling.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Prefix:
    """The blocks that a sequence starts from."""

    blocks: list[int]
    tokens: int
    committed: int
    """Blocks that the cache knows already."""
    node: int
    """The cache's name for the last of those; 0 = none."""


class Prefixes:
    """Looks prefixes up when a sequence starts, and makes its full blocks known as it runs."""

    def __init__(self, limits: Limits, cache: PrefixCache | None) -> None:
        self._limits = limits
        self._cache = cache

    def known(self, sequence: Sequence) -> Prefix:
        """From a running parent or from the cache, whichever has more."""
        most = len(sequence.tokens) - 1
        cached = self._cached(sequence, most)
        parent = sequence.parent
        if parent is not None and parent.state is SequenceState.RUNNING and sequence.use_cache:
            tokens = min(most, sequence.shared_limit)
            if cached.tokens < tokens <= parent.num_done:
                blocks = parent.block_table[: self._limits.blocks_for(tokens)]
                known = min(cached.committed, tokens // self._limits.block_size)
                return Prefix(blocks, tokens, known, cached.node)
        return cached

    def commit(self, sequence: Sequence, computed: int) -> None:
        """Tell the cache of blocks that a step has filled."""
        if self._cache is None:
            return
        size = self._limits.block_size
        full = min(computed, len(sequence.tokens)) // size
        while sequence.num_committed < full:
            index = sequence.num_committed
            key = token_key(sequence.tokens[index * size : (index + 1) * size])
            parent = sequence.last_node or sequence.cache_context
            sequence.last_node = self._cache.commit(parent, key, sequence.block_table[index])
            sequence.num_committed += 1

    def _cached(self, sequence: Sequence, limit: int) -> Prefix:
        """The longest chain of known blocks within the first `limit` tokens."""
        blocks: list[int] = []
        node, size = 0, self._limits.block_size
        if self._cache is None or not sequence.use_cache:
            return Prefix(blocks, 0, 0, node)
        for start in range(0, limit - limit % size, size):
            key = token_key(sequence.tokens[start : start + size])
            hit = self._cache.find(node or sequence.cache_context, key)
            if hit is None:
                break
            node, block = hit
            blocks.append(block)
        return Prefix(blocks, len(blocks) * size, len(blocks), node)
