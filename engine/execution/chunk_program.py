"""Steps on a CPU that hold chunks of prompts, as one recorded program for any number of rows.

Like the programs of decode steps it reads and writes fixed memory, and its operations are those of
Decoder.forward, on the same values, so the results are the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.recording import NotRecordable, RowsProgram, record_rows
from tokenfleet.kernels.workspace import Workspace

MOST_ROWS = 1024
"""Of a step; in larger ones the kernels take far longer than what Python does between them."""

logger = logging.getLogger("tokenfleet.engine")


class ChunkProgram:
    """Records itself when the first step comes.

    Args:
        most_sequences: of the largest step that it does.
        max_blocks: of one sequence.
    """

    def __init__(
        self, decoder: Decoder, pools: Items[KVPool], *, most_sequences: int, max_blocks: int
    ) -> None:
        self._decoder, self._pools = decoder, pools
        self._workspace = Workspace()
        # not cleared: what no step has touched takes no memory
        self._embedded = torch.empty((MOST_ROWS, decoder.spec.hidden_size), dtype=decoder.dtype)
        self._slots = torch.empty(MOST_ROWS, dtype=torch.int64)
        self._positions = torch.empty(MOST_ROWS, dtype=torch.int64)
        self._query_starts = torch.zeros(most_sequences + 1, dtype=torch.int32)
        self._kv_lens = torch.zeros(most_sequences, dtype=torch.int32)
        self._block_tables = torch.zeros((most_sequences, max_blocks), dtype=torch.int32)
        self._program: RowsProgram | None = None
        self._refused = False

    @property
    def recorded(self) -> bool:
        """Whether there has been a step that it could do."""
        return self._program is not None

    def forward(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor | None:
        """What Decoder.forward gives for this step, until the next one; None when no program can
        do it."""
        rows, sequences = token_ids.shape[0], batch.num_sequences
        if rows > MOST_ROWS or sequences > len(self._kv_lens) or self._refused:
            return None
        program = self._program
        if program is None or not program.current:
            program = self._record()
            if program is None:
                return None
        self._fill(token_ids, batch)
        return program.run(rows, sequences)

    def _fill(self, token_ids: Tensor, batch: AttentionBatch) -> None:
        rows, (sequences, width) = token_ids.shape[0], batch.block_tables.shape
        self._embedded[:rows] = self._decoder.embed(token_ids)
        self._slots[:rows] = batch.slots
        self._positions[:rows] = batch.positions
        self._query_starts[: sequences + 1] = batch.query_starts
        self._kv_lens[:sequences] = batch.kv_lens
        self._block_tables[:sequences, :width] = batch.block_tables

    def _record(self) -> RowsProgram | None:
        try:
            self._program = record_rows(self._transform, self._workspace, MOST_ROWS)
        except NotRecordable as reason:
            logger.debug("steps with prompts are not recorded: %s", reason)
            self._program, self._refused = None, True
        return self._program

    def _transform(self) -> Tensor:
        batch = AttentionBatch(
            query_starts=self._query_starts,
            kv_lens=self._kv_lens,
            block_tables=self._block_tables,
            slots=self._slots,
            positions=self._positions,
            num_decodes=0,
            max_query_len=MOST_ROWS,
            max_kv_len=0,
        )
        return self._decoder.transform(self._embedded, batch, self._pools, self._workspace)
