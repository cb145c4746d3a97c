"""Turns planned chunks into the tensors of one forward pass.

Tokens lie sequence after sequence, one-token sequences first (see AttentionBatch). No loop over
sequences touches a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.execution.transfers import Transfers
from tokenfleet.engine.scheduling.plan import Chunk
from tokenfleet.kernels.paged_attention import AttentionBatch
from tokenfleet.kernels.token_pool import gather_tokens


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward pass over S chunks of T tokens in total."""

    token_ids: Tensor
    """int64 [T]."""
    attention: AttentionBatch
    last_rows: Tensor
    """int64 [S]: the row of each chunk's last token."""
    first_rows: NDArray[np.int32]
    """[S]: the row of each chunk's first token."""
    slots: NDArray[np.int64]
    """[S]: slot of each chunk's sequence."""
    ends: NDArray[np.int64]
    """[S]: tokens computed of each sequence after this step."""


def build_inputs(
    work: list[Chunk], table: SlotTable, transfers: Transfers, pool: Tensor | None = None
) -> StepInputs:
    """Inputs for these chunks; those of one token must come first.

    pool: int64 [slots], the last token sampled for each slot, where a token is looked up that has
    not reached the host; None when every token has.
    """
    size, send = table.block_size, transfers.send
    count = len(work)
    slots = np.fromiter((c.sequence.slot for c in work), np.int64, count)
    starts = np.fromiter((c.start for c in work), np.int64, count)
    counts = np.fromiter((c.count for c in work), np.int64, count)
    ends = starts + counts
    longest = int(ends.max())
    table.make_room(longest)
    rows = np.zeros(count + 1, np.int32)
    np.cumsum(counts, out=rows[1:])
    total = int(rows[-1])
    owner = np.repeat(np.arange(count), counts)
    positions = np.arange(total) - (rows[:-1].astype(np.int64) - starts)[owner]
    places = table.blocks[slots[owner], positions // size].astype(np.int64)
    token_ids = send(table.tokens[slots[owner], positions].astype(np.int64))
    if pool is not None:
        known = np.fromiter((len(c.sequence.tokens) for c in work), np.int64, count)
        unseen = positions >= known[owner]
        token_ids = gather_tokens(token_ids, pool, send(slots[owner]), send(unseen))
    return StepInputs(
        token_ids=token_ids,
        attention=AttentionBatch(
            query_starts=send(rows),
            kv_lens=send(ends.astype(np.int32)),
            block_tables=send(table.blocks[slots, : -(-longest // size)]),
            slots=send(places * size + positions % size),
            positions=send(positions),
            num_decodes=int((counts == 1).sum()),
            max_query_len=int(counts.max()),
            max_kv_len=longest,
        ),
        last_rows=send(rows[1:].astype(np.int64) - 1),
        first_rows=rows[:-1],
        slots=slots,
        ends=ends,
    )
