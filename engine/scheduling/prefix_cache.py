"""Which full blocks hold which prefix.

A prefix is a path in a trie: node = (parent node, the block's tokens). Keys are compared as wholes,
so two prefixes never share a node by a hash collision. A node exists exactly as long as a block
holds it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from itertools import count

MAX_CONTEXTS = 1024
"""Roots that are remembered; the prefixes of one used longer ago are no longer found."""

Key = tuple[int, bytes]
"""(parent node or context, tokens of the block as 32-bit integers)."""


def token_key(tokens: Tokens[int]) -> bytes:
    """The tokens of one block as bytes: equal exactly when the tokens are."""
    return array("i", tokens).tobytes()


class PrefixCache:
    """Maps prefixes to the block that holds their last `block_size` tokens."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._contexts: OrderedDict[tuple[int, int, str], int] = OrderedDict()
        self._node_of: dict[Key, int] = {}
        self._block_of: dict[int, int] = {}
        self._key_in: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def context(self, *, weights_version: int = 0, adapter: int = 0, salt: str = "") -> int:
        """Root node of prefixes that may be shared: the same weights, adapter and salt."""
        key = (weights_version, adapter, salt)
        context = self._contexts.pop(key, 0) or next(self._ids)
        self._contexts[key] = context
        if len(self._contexts) > MAX_CONTEXTS:
            self._contexts.popitem(last=False)
        return context

    def find(self, parent: int, key: bytes) -> tuple[int, int] | None:
        """(node, block) of the block with these tokens after `parent`, or None."""
        node = self._node_of.get((parent, key))
        return None if node is None else (node, self._block_of[node])

    def commit(self, parent: int, key: bytes, block: int) -> int:
        """Record that `block` holds these tokens after `parent`; the node to go on from.

        A prefix that another block already holds keeps that block, and a block keeps the prefix
        it is known by (the same tokens, reached through a node that is gone by now).
        """
        full = self._key_in.get(block, (parent, key))
        node = self._node_of.get(full)
        if node is None:
            node = next(self._ids)
            self._node_of[full] = node
            self._block_of[node] = block
            self._key_in[block] = full
        return node

    def holds(self, block: int) -> bool:
        """Whether some prefix leads to this block."""
        return block in self._key_in

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        key = self._key_in.pop(block, None)
        if key is not None:
            del self._block_of[self._node_of.pop(key)]

    def clear(self) -> None:
        """Forget every prefix and context, as after a change of weights."""
        for table in (self._contexts, self._node_of, self._block_of, self._key_in):
            table.clear()

    def faults(self) -> list[str]:
        """What is inconsistent, for audit()."""
        found = []
        if not len(self._node_of) == len(self._block_of) == len(self._key_in):
            found.append("prefix cache tables differ in length")
        for key, node in self._node_of.items():
            if self._key_in.get(self._block_of.get(node, -1)) != key:
                found.append(f"prefix node {node} and its block disagree")
        return found
