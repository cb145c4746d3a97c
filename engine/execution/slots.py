"""What the running batch remembers per slot, as numpy rows.

A row is written when its sequence is admitted and changed only where a step changed it, so a step's
inputs are a few vectorised look-ups, whatever the number of sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenfleet.engine.execution.columns import Columns, Ids
from tokenfleet.engine.scheduling.sequence import Sequence

_FIRST_WIDTH = 512


class SlotTable:
    """Tokens and block tables of the running sequences.

    tokens int32 [num_slots, width], of which `known` int64 [num_slots] are written; blocks int32
    [num_slots, width / block_size]. Both widen by doubling up to max_len, so short contexts on a
    long-context model cost little.
    """

    def __init__(self, num_slots: int, block_size: int, max_len: int) -> None:
        self.block_size = block_size
        self._max_len = max_len
        width = min(_FIRST_WIDTH, max_len)
        self.tokens: NDArray[np.int32] = np.zeros((num_slots, width), np.int32)
        self.known = np.zeros(num_slots, np.int64)
        self.blocks: NDArray[np.int32] = np.zeros((num_slots, self._blocks_for(width)), np.int32)

    def admit(self, sequence: Sequence) -> None:
        """Fill the row of a sequence that just got its slot."""
        count = len(sequence.tokens)
        self.make_room(count + 1)
        self.tokens[sequence.slot, :count] = sequence.tokens
        self.known[sequence.slot] = count
        self.update_blocks(sequence, 0)

    def update_blocks(self, sequence: Sequence, first: int) -> None:
        """Copy a block table from index `first` on."""
        table = sequence.block_table
        self.make_room(len(table) * self.block_size)
        self.blocks[sequence.slot, first : len(table)] = table[first:]

    def append(self, step: Columns, tokens: Ids) -> None:
        """Write the tokens [S] that a step sampled behind those of their sequences; a negative one
        is none."""
        slots, places = step.slots, step.ends
        sampled = tokens >= 0
        if not sampled.all():
            slots, places, tokens = slots[sampled], places[sampled], tokens[sampled]
        if places.size:
            self.make_room(int(places.max()) + 1)
            self.tokens[slots, places] = tokens
            self.known[slots] = places + 1

    def make_room(self, tokens: int) -> None:
        """Widen the rows to this many tokens at least."""
        width = self.tokens.shape[1]
        if tokens <= width:
            return
        wider = min(max(tokens, 2 * width), max(tokens, self._max_len))
        self.tokens = _widened(self.tokens, wider)
        self.blocks = _widened(self.blocks, self._blocks_for(wider))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _widened(table: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    wide = np.zeros((table.shape[0], width), np.int32)
    wide[:, : table.shape[1]] = table
    return wide
