"""Where recorded programs look for a step's inputs.

The tensors keep their addresses for as long as the programs over them run; a step is copied into
their first rows, and what stands behind those is left from an earlier one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.paged_attention import AttentionBatch


class ProgramInputs:
    """Embedded tokens of a step, and what attention takes beside them.

    Args:
        rows: tokens of the largest step.
        sequences: of the largest step.
        max_blocks: of one sequence.
    """

    def __init__(self, decoder: Decoder, *, rows: int, sequences: int, max_blocks: int) -> None:
        self.most_rows, self.most_sequences = rows, sequences
        self._decoder = decoder
        # not cleared: what no step has touched takes no memory
        self._embedded = torch.empty((rows, decoder.spec.hidden_size), dtype=decoder.dtype)
        self._slots = torch.empty(rows, dtype=torch.int64)
        self._positions = torch.empty(rows, dtype=torch.int64)
        self._query_starts = torch.zeros(sequences + 1, dtype=torch.int32)
        self._kv_lens = torch.zeros(sequences, dtype=torch.int32)
        self._block_tables = torch.zeros((sequences, max_blocks), dtype=torch.int32)

    def fill(self, token_ids: Tensor, batch: AttentionBatch) -> None:
        """Write a step of token_ids int64 [T] into the first rows."""
        rows, (sequences, width) = token_ids.shape[0], batch.block_tables.shape
        self._embedded[:rows] = self._decoder.embed(token_ids)
        self._slots[:rows] = batch.slots
        self._positions[:rows] = batch.positions
        self._query_starts[: sequences + 1] = batch.query_starts
        self._kv_lens[:sequences] = batch.kv_lens
        self._block_tables[:sequences, :width] = batch.block_tables

    def first(self, rows: int, sequences: int, num_decodes: int) -> tuple[Tensor, AttentionBatch]:
        """Views of the first rows [rows, hidden size] and sequences, as Decoder.transform takes
        them; `num_decodes` of the sequences have one token each."""
        return self._embedded[:rows], AttentionBatch(
            query_starts=self._query_starts[: sequences + 1],
            kv_lens=self._kv_lens[:sequences],
            block_tables=self._block_tables[:sequences],
            slots=self._slots[:rows],
            positions=self._positions[:rows],
            num_decodes=num_decodes,
            max_query_len=1 if num_decodes == sequences else rows,
            max_kv_len=0,
        )
