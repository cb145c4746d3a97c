"""Steps on a CPU as recorded programs: decodes have one for each number of sequences, steps with
chunks of prompts share one (chunk_program.py).

A program reads and writes fixed memory: a step's inputs are copied to where it looks for them. The
operations are those of Decoder.forward, on the same values, so the results are the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tokenfleet.engine.execution.chunk_program import ChunkProgram
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.recording import NotRecordable, Program, record
from tokenfleet.kernels.workspace import Workspace

MOST_RECORDED = 64
"""Sequences; in larger steps the kernels take longer than what Python does between them."""

logger = logging.getLogger("tokenfleet.engine")


class DecodePrograms:
    """Records a step of each number of sequences when one first comes.

    `chunks` takes the steps in which a sequence has more than one token.

    Args:
        most: sequences of the largest step; a larger one is not recorded.
        max_blocks: of one sequence.
    """

    def __init__(
        self,
        decoder: Decoder,
        pools: Items[KVPool],
        *,
        most: int,
        max_blocks: int,
    ) -> None:
        self.chunks = ChunkProgram(decoder, pools, most_sequences=most, max_blocks=max_blocks)
        self._decoder, self._pools = decoder, pools
        self._workspace = Workspace()  # one program runs at a time
        self._embedded = torch.zeros((most, decoder.spec.hidden_size), dtype=decoder.dtype)
        self._kv_lens = torch.zeros(most, dtype=torch.int32)
        self._block_tables = torch.zeros((most, max_blocks), dtype=torch.int32)
        self._slots = torch.full((most,), -1)
        self._positions = torch.zeros(most, dtype=torch.int64)
        self._query_starts = torch.arange(most + 1, dtype=torch.int32)
        self._programs: dict[int, Program] = {}
        self._refused = False

    def __len__(self) -> int:
        """How many numbers of sequences have been recorded."""
        return len(self._programs)

    def forward(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor | None:
        """What Decoder.forward gives for this step, until the next one of as many sequences; None
        when no program can do it."""
        rows = token_ids.shape[0]
        if batch.max_query_len > 1:
            return self.chunks.forward(token_ids, batch)
        if rows > len(self._kv_lens) or self._refused:
            return None
        self._fill(token_ids, batch)
        program = self._programs.get(rows)
        if program is not None and program.current:
            return program.run()
        return self._recorded(rows)

    def _fill(self, token_ids: Tensor, batch: AttentionBatch) -> None:
        rows, width = batch.block_tables.shape
        self._embedded[:rows] = self._decoder.embed(token_ids)
        self._kv_lens[:rows] = batch.kv_lens
        self._block_tables[:rows, :width] = batch.block_tables
        self._slots[:rows] = batch.slots
        self._positions[:rows] = batch.positions

    def _recorded(self, rows: int) -> Tensor | None:
        try:
            program = record(lambda: self._transform(rows), self._workspace)
        except NotRecordable as reason:
            logger.debug("decode steps are not recorded: %s", reason)
            self._refused = True
            return None
        self._programs[rows] = program
        return program.result

    def _transform(self, rows: int) -> Tensor:
        batch = AttentionBatch(
            query_starts=self._query_starts[: rows + 1],
            kv_lens=self._kv_lens[:rows],
            block_tables=self._block_tables[:rows],
            slots=self._slots[:rows],
            positions=self._positions[:rows],
            num_decodes=rows,
            max_query_len=1,
            max_kv_len=0,
        )
        return self._decoder.transform(self._embedded[:rows], batch, self._pools, self._workspace)
