"""Steps on a CPU as recorded programs, so that Python is not asked between two kernels.

A program reads and writes fixed memory: a step's inputs are copied to where it looks for them. The
operations are those of Decoder.forward, on the same values, so the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from torch import Tensor

from tokenfleet.engine.execution.chunk_program import ChunkProgram
from tokenfleet.engine.execution.decode_programs import DecodePrograms
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool

MOST_RECORDED = 64
"""Sequences; in larger steps the kernels take longer than what Python does between them."""


class StepPrograms:
    """`decodes` does the steps in which each sequence has one token, `chunks` the others.

    Args:
        num_slots: most sequences that a step may have; steps of more than MOST_RECORDED are left
            to Decoder.forward.
        max_blocks: of one sequence.
    """

    def __init__(
        self, decoder: Decoder, pools: Items[KVPool], *, num_slots: int, max_blocks: int
    ) -> None:
        most = min(num_slots, MOST_RECORDED)
        self.decodes = DecodePrograms(decoder, pools, most=most, max_blocks=max_blocks)
        self.chunks = ChunkProgram(decoder, pools, most_sequences=most, max_blocks=max_blocks)

    def forward(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor | None:
        """What Decoder.forward gives for this step, until the next one; None when no program can
        do it."""
        programs = self.chunks if batch.max_query_len > 1 else self.decodes
        return programs.forward(token_ids, batch)
