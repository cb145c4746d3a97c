"""The block tables of running sequences: how they begin, grow, and go back to the pool.

Nobody writes to a block that others hold too: a sequence whose next token belongs into a shared one
gets a block of its own, into which that one is copied first (copy-on-write).
"""

from __future__ import annotations

from tokenfleet.engine.scheduling.block_pool import BlockPool
from tokenfleet.engine.scheduling.limits import Limits
from tokenfleet.engine.scheduling.plan import StepPlan
from tokenfleet.engine.scheduling.prefixes import Prefix
from tokenfleet.engine.scheduling.sequence import Sequence


class BlockTables:
    """Keeps each sequence's table in step with the pool."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self._limits = limits
        self._pool = pool

    def start(self, sequence: Sequence, prefix: Prefix) -> None:
        """Begin with the blocks of a known prefix, which count as computed."""
        self._pool.share(prefix.blocks)
        sequence.block_table = list(prefix.blocks)
        sequence.num_computed = sequence.num_done = prefix.tokens
        sequence.num_committed, sequence.last_node = prefix.committed, prefix.node

    def missing(self, sequence: Sequence, upto: int) -> int:
        """Blocks to take before its tokens up to `upto` may be written."""
        own = self._shared_tail(sequence)
        return self._limits.blocks_for(upto) - len(sequence.block_table) + own

    def grow(self, plan: StepPlan, sequence: Sequence, missing: int) -> None:
        """Take the blocks that `missing` counted, and put into the plan what changed."""
        table, size = sequence.block_table, self._limits.block_size
        if missing:
            fresh = self._pool.take(missing)
            changed = len(table)
            if self._shared_tail(sequence):
                changed = sequence.num_computed // size
                plan.copies.append((table[changed], fresh[0]))
                self._pool.give_back([table[changed]])
                table[changed] = fresh.pop(0)
            table.extend(fresh)
            plan.grown.append((sequence, changed))
        sequence.num_owned = len(table) * size

    def give_back(self, sequence: Sequence) -> None:
        """Leave it without blocks, as if nothing of it had been computed."""
        self._pool.give_back(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_done = sequence.num_owned = 0
        sequence.num_committed = sequence.last_node = 0

    def _shared_tail(self, sequence: Sequence) -> bool:
        """Whether the block that will be written first belongs to others too."""
        index = sequence.num_computed // self._limits.block_size
        table = sequence.block_table
        return index < len(table) and self._pool.refs(table[index]) > 1
