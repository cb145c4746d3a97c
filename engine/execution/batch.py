"""Turns planned chunks into the tensors of one forward pass.

Tokens lie sequence after sequence, one-token sequences first (see AttentionBatch). No loop over
sequences touches a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenfleet.engine.execution.columns import Columns
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.execution.transfers import Transfers
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


def build_inputs(
    work: Columns, table: SlotTable, transfers: Transfers, pool: Tensor | None = None
) -> StepInputs:
    """Inputs for these chunks.

    pool: int64 [slots], the last token sampled for each slot, where a token is looked up that has
    not reached the host; None when every token has.
    """
    size, send = table.block_size, transfers.send
    slots, counts, ends = work.slots, work.counts, work.ends
    count, longest = len(slots), int(ends.max())
    table.make_room(longest)
    rows = np.zeros(count + 1, np.int32)
    np.cumsum(counts, out=rows[1:])
    total = int(rows[-1])
    owner = np.repeat(np.arange(count), counts)
    positions = np.arange(total) - (rows[:-1].astype(np.int64) - work.starts)[owner]
    places = table.blocks[slots[owner], positions // size].astype(np.int64)
    token_ids = send(table.tokens[slots[owner], positions].astype(np.int64))
    if pool is not None:
        unseen = positions >= table.known[slots[owner]]
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
    )
