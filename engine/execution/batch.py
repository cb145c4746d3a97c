"""Turns planned chunks into the tensors of one forward pass.

Tokens lie sequence after sequence, one-token sequences first (see AttentionBatch). No loop over
sequences touches a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.scheduling.plan import Chunk
from tokenfleet.kernels.paged_attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of one forward pass over S chunks of T tokens in total."""

    token_ids: Tensor
    """int64 [T]."""
    attention: AttentionBatch
    last_rows: Tensor
    """int64 [S]: the row of each chunk's last token."""
    slots: NDArray[np.int64]
    """[S]: slot of each chunk's sequence."""
    ends: NDArray[np.int64]
    """[S]: tokens computed of each sequence after this step."""


def build_inputs(work: list[Chunk], table: SlotTable, device: torch.device) -> StepInputs:
    """Inputs for these chunks; those of one token must come first."""
    size = table.block_size
    count = len(work)
    slots = np.fromiter((c.sequence.slot for c in work), np.int64, count)
    starts = np.fromiter((c.start for c in work), np.int64, count)
    counts = np.fromiter((c.count for c in work), np.int64, count)
    ends = starts + counts
    rows = np.zeros(count + 1, np.int32)
    np.cumsum(counts, out=rows[1:])
    total = int(rows[-1])
    owner = np.repeat(np.arange(count), counts)
    positions = np.arange(total) - (rows[:-1].astype(np.int64) - starts)[owner]
    places = table.blocks[slots[owner], positions // size].astype(np.int64)
    longest = int(ends.max())
    return StepInputs(
        token_ids=_on(table.tokens[slots[owner], positions].astype(np.int64), device),
        attention=AttentionBatch(
            query_starts=_on(rows, device),
            kv_lens=_on(ends.astype(np.int32), device),
            block_tables=_on(table.blocks[slots, : -(-longest // size)], device),
            slots=_on(places * size + positions % size, device),
            positions=_on(positions, device),
            num_decodes=int((counts == 1).sum()),
            max_query_len=int(counts.max()),
            max_kv_len=longest,
        ),
        last_rows=_on(rows[1:].astype(np.int64) - 1, device),
        slots=slots,
        ends=ends,
    )


def _on(array: NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
