"""Log probabilities of a prompt's own tokens, a bounded number of rows at a time.

Full logits of a long prompt would be prompt x vocabulary; no more than ROWS x vocabulary exist
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from tokenfleet.engine.execution.reports import Report, look_up
from tokenfleet.engine.execution.transfers import Transfers
from tokenfleet.engine.scheduling.plan import Chunk

ROWS = 64


def wanted(chunk: Chunk) -> int:
    """How many of the chunk's positions predict a prompt token that was asked about."""
    sequence = chunk.sequence
    if sequence.params.prompt_logprobs is None or sequence.choice:
        return 0
    return max(0, min(chunk.start + chunk.count, sequence.num_prompt - 1) - chunk.start)


def prompt_logprobs(
    chunk: Chunk,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    unknown: Tensor | None,
    transfers: Transfers,
) -> Iterator[tuple[int, Report]]:
    """(position of the first, report) of runs of the prompt tokens that this chunk predicts.

    Args:
        hidden: [wanted(chunk), hidden size], the chunk's first rows.
        logits_of: hidden rows -> logits fp32 [rows, V].
        unknown: ids that are not listed.
    """
    sequence = chunk.sequence
    for first in range(0, hidden.shape[0], ROWS):
        rows = hidden[first : first + ROWS]
        at = chunk.start + first + 1
        tokens = np.array(sequence.tokens[at : at + rows.shape[0]], np.int64)
        top = np.full(len(tokens), sequence.params.prompt_logprobs, np.int64)
        yield at, look_up(logits_of(rows), transfers.send(tokens), top, unknown)
