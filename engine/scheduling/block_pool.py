"""Who owns which KV block.

A block is free, or owned with a reference count above zero; never both. Block 0 is the null block:
it is never given out, and padding points at it. A free block may still hold a known prefix until it
is given out again, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tokenfleet.engine.errors import InvariantBroken
from tokenfleet.engine.scheduling.prefix_cache import PrefixCache


class BlockPool:
    """Reference-counted blocks 1..num_blocks.

    Args:
        num_blocks: usable blocks; the null block is not counted.
        cache: told before a block that holds a prefix is given out again; None = no prefix cache.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self.num_cached = 0
        """Free blocks that hold a known prefix."""
        self._refs = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that someone owns."""
        return self.num_blocks - len(self._free)

    def refs(self, block: int) -> int:
        """How many block tables hold the block."""
        return self._refs[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks for one owner, least recently used first.

        Raises:
            InvariantBroken: fewer are free; ask num_free first.
        """
        if count > len(self._free):
            raise InvariantBroken(f"asked for {count} blocks, {len(self._free)} are free")
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self.num_cached -= self._holds_prefix(block)
            if self._cache is not None:
                self._cache.forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for blocks that are owned, or free and still hold a prefix."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
                self.num_cached -= self._holds_prefix(block)
            self._refs[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """One owner less, tail first, so that the ends of prefixes are reused before their roots.

        Raises:
            InvariantBroken: a block had no owner.
        """
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise InvariantBroken(f"block {block} was given back and has no owner")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._holds_prefix(block):
                    self.num_cached += 1
                else:
                    self._free.move_to_end(block, last=False)

    def forget_prefixes(self) -> None:
        """No block holds a known prefix any more."""
        if self._cache is not None:
            self._cache.clear()
        self.num_cached = 0

    def _holds_prefix(self, block: int) -> bool:
        return self._cache is not None and self._cache.holds(block)

    def num_free_in(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free (sharing them would use them up)."""
        return sum(self._refs[block] == 0 for block in blocks)

    def faults(self, tables: Iterable[list[int]]) -> list[str]:
        """What is inconsistent with the block tables that exist, for audit()."""
        counted = [0] * (self.num_blocks + 1)
        for table in tables:
            for block in table:
                counted[block] += 1
        found = [
            f"block {block}: {self._refs[block]} references, {counted[block]} in block tables"
            for block in range(self.num_blocks + 1)
            if self._refs[block] != counted[block]
        ]
        found += [f"block {block} is free and owned" for block in self._free if self._refs[block]]
        idle = sum(refs == 0 for refs in self._refs[1:])
        if idle != len(self._free):
            found.append(f"{idle} blocks have no owner, {len(self._free)} are free")
        cached = sum(self._holds_prefix(block) for block in self._free)
        if cached != self.num_cached:
            found.append(f"{cached} free blocks hold a prefix, {self.num_cached} are counted")
        if 0 in self._free or self._refs[0]:
            found.append("the null block was given out")
        return found
