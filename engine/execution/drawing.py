"""From hidden states to what a step says of each of its sequences: a token, nothing yet, that the
model broke, or that nothing may be chosen; and the log probabilities that go with it.

Nothing here changes what a later step reads, so it may be done again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenfleet.engine.execution.columns import Columns, Ids
from tokenfleet.engine.execution.flight import NO_TOKEN, STUCK, Listing
from tokenfleet.engine.execution.param_table import ParamTable
from tokenfleet.engine.execution.prompt_logprobs import prompt_logprobs, wanted
from tokenfleet.engine.execution.sampler import Sampled, Sampler
from tokenfleet.engine.execution.transfers import Transfers
from tokenfleet.engine.scheduling.plan import Chunk
from tokenfleet.kernels.step import POISONED

LogitsOf = Callable[[Tensor], Tensor]
"""Hidden rows [R, hidden size] -> logits fp32 [R, V]."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came out for S chunks."""

    verdicts: Tensor
    """int64 [S]: a token, NO_TOKEN, STUCK or POISONED."""
    listings: list[Listing]
    slots: Ids
    """Of the sequences that got a token."""
    tokens: Tensor | None
    """int64 [len(slots)]; None where nobody got one."""


class Drawing:
    """Samples where chunks reached the end of their sequences.

    Args:
        unknown: ids int64 that the tokenizer does not have; they are never listed.
    """

    def __init__(
        self,
        sampler: Sampler,
        params: ParamTable,
        unknown: Tensor | None,
        transfers: Transfers,
        device: torch.device,
    ) -> None:
        self._sampler, self._params = sampler, params
        self._unknown, self._transfers = unknown, transfers
        self._device = device

    def __call__(
        self, logits_of: LogitsOf, columns: Columns, hidden: Tensor, last_ids: Tensor | None
    ) -> Drawn:
        """Draw for S chunks.

        Args:
            hidden: [S, hidden size], of each chunk's last token.
            last_ids: int64 [S], that token; None where the host knows it.
        """
        poisoned = ~torch.isfinite(hidden).all(-1)
        count, picks = len(columns.slots), np.flatnonzero(columns.samples)
        slots, ends = columns.slots[picks], columns.ends[picks]
        if picks.size == count:
            sampled = self._sampler(logits_of(hidden), slots, ends, last_ids)
            verdicts = _told(sampled)
            poisoned |= sampled.poisoned
        else:
            verdicts = torch.full((count,), NO_TOKEN, device=self._device)
            if not picks.size:
                return Drawn(verdicts.masked_fill_(poisoned, POISONED), [], slots, None)
            where = self._transfers.send(picks)
            ids = None if last_ids is None else last_ids[where]
            sampled = self._sampler(logits_of(hidden[where]), slots, ends, ids)
            verdicts[where] = _told(sampled)
            poisoned[where] |= sampled.poisoned
        listings = [Listing(report, picks[rows]) for rows, report in sampled.reports]
        return Drawn(verdicts.masked_fill(poisoned, POISONED), listings, slots, sampled.tokens)

    def of_prompts(
        self,
        logits_of: LogitsOf,
        work: list[Chunk],
        columns: Columns,
        first_rows: NDArray[np.int32],
        hidden: Tensor,
    ) -> list[Listing]:
        """Log probabilities of prompt tokens.

        Args:
            first_rows: [S], the row of each chunk's first token.
            hidden: [T, hidden size], of all tokens.
        """
        found = []
        for i in np.flatnonzero(self._params.lists_prompt[columns.slots]).tolist():
            first = int(first_rows[i])
            rows = hidden[first : first + wanted(work[i])]
            reports = prompt_logprobs(work[i], rows, logits_of, self._unknown, self._transfers)
            found += [Listing(report, None, i, position) for position, report in reports]
        return found


def _told(sampled: Sampled) -> Tensor:
    """The tokens of rows that could choose one."""
    if sampled.stuck is None:
        return sampled.tokens
    return sampled.tokens.masked_fill(sampled.stuck, STUCK)
