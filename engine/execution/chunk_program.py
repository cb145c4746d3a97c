"""Steps on a CPU that hold chunks of prompts, as one recorded program for any number of rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items

from torch import Tensor

from tokenfleet.engine.execution.program_inputs import ProgramInputs
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.recording import NotRecordable, RowsProgram, record_rows
from tokenfleet.kernels.workspace import Workspace

MOST_ROWS = 1024
"""Of a step; in larger ones the kernels take far longer than what Python does between them."""

logger = logging.getLogger("tokenfleet.engine")


class ChunkProgram:
    """Records itself when the first step comes, without computing anything.

    Args:
        most_sequences: of the largest step that it does.
        max_blocks: of one sequence.
    """

    def __init__(
        self, decoder: Decoder, pools: Items[KVPool], *, most_sequences: int, max_blocks: int
    ) -> None:
        self._decoder, self._pools = decoder, pools
        self._workspace = Workspace()
        self._inputs = ProgramInputs(
            decoder, rows=MOST_ROWS, sequences=most_sequences, max_blocks=max_blocks
        )
        self._program: RowsProgram | None = None
        self._refused = False

    @property
    def recorded(self) -> bool:
        """Whether there has been a step that it could do."""
        return self._program is not None

    def forward(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor | None:
        """What Decoder.forward gives for this step, until the next one; None when no program can
        do it."""
        rows, sequences, inputs = token_ids.shape[0], batch.num_sequences, self._inputs
        if rows > inputs.most_rows or sequences > inputs.most_sequences or self._refused:
            return None
        program = self._program
        if program is None or not program.current:
            program = self._record()
            if program is None:
                return None
        inputs.fill(token_ids, batch)
        return program.run(rows, sequences)

    def _record(self) -> RowsProgram | None:
        try:
            self._program = record_rows(self._transform, self._workspace, self._inputs.most_rows)
        except NotRecordable as reason:
            logger.debug("steps with prompts are not recorded: %s", reason)
            self._program, self._refused = None, True
        return self._program

    def _transform(self) -> Tensor:
        inputs = self._inputs
        embedded, batch = inputs.first(inputs.most_rows, inputs.most_sequences, num_decodes=0)
        return self._decoder.transform(embedded, batch, self._pools, self._workspace)
