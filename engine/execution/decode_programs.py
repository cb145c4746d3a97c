"""Steps on a CPU in which each sequence has one token, as recorded programs: one for each number of
sequences, made when a step of that many first comes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items

from torch import Tensor

from tokenfleet.engine.execution.program_inputs import ProgramInputs
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.recording import NotRecordable, Program, record
from tokenfleet.kernels.workspace import Workspace

logger = logging.getLogger("tokenfleet.engine")


class DecodePrograms:
    """The programs of decode steps.

    Args:
        most: sequences of the largest step; a larger one is not recorded.
        max_blocks: of one sequence.
    """

    def __init__(
        self, decoder: Decoder, pools: Items[KVPool], *, most: int, max_blocks: int
    ) -> None:
        self._decoder, self._pools = decoder, pools
        self._workspace = Workspace()  # one program runs at a time
        self._inputs = ProgramInputs(decoder, rows=most, sequences=most, max_blocks=max_blocks)
        self._programs: dict[int, Program] = {}
        self._refused = False

    def __len__(self) -> int:
        """How many numbers of sequences have been recorded."""
        return len(self._programs)

    def forward(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor | None:
        """What Decoder.forward gives for this step, until the next one of as many sequences; None
        when no program can do it."""
        rows = token_ids.shape[0]
        if rows > self._inputs.most_rows or self._refused:
            return None
        self._inputs.fill(token_ids, batch)
        program = self._programs.get(rows)
        if program is not None and program.current:
            return program.run()
        return self._recorded(rows)

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
        embedded, batch = self._inputs.first(rows, rows, num_decodes=rows)
        return self._decoder.transform(embedded, batch, self._pools, self._workspace)
