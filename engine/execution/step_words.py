"""A bucket's inputs as one run of 64-bit words, so that a step's inputs are one copy.

The whole run is written for each step, padding included. A padding token writes no KV (its slot is
the spare row of the tables); a padding sequence has kv_len 0. What follows from these words by
arithmetic (positions in blocks, block tables) is computed on the device.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenfleet.engine.execution.buckets import Bucket
from tokenfleet.engine.execution.columns import Columns, Ids
from tokenfleet.engine.execution.param_table import ParamTable
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.kernels.sampling import SamplingRows
from tokenfleet.kernels.step import StepTokens

_TOKEN_ROWS, _SEQUENCE_ROWS = 4, 8
_NO_TOP_K = (1 << 31) - 1
"""Beyond every vocabulary: off."""


class StepWords:
    """The words of one bucket, on the device; its fields are views that keep their addresses."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        T, S = bucket.tokens, bucket.sequences
        self.bucket = bucket
        self.data = torch.zeros(num_words(bucket), dtype=torch.int64, device=device)
        lengths = (_TOKEN_ROWS * T, _SEQUENCE_ROWS * S, S + 1)
        tokens, sequences, starts = self.data.split_with_sizes(lengths)
        self.token_ids, self.from_pool, self.positions, self.token_slots = tokens.view(-1, T)
        rows = sequences.view(-1, S)
        self.slots, self.ends, self.last_rows, self.greedy, self.top_k = rows[:5]
        self.keys = rows[5].view(torch.int32).view(S, 2)
        self.temperature, self.top_p = rows[6].view(torch.float32).view(2, S)
        self.min_p = rows[7].view(torch.float32)[:S]
        self.query_starts = starts

    def step_tokens(self) -> StepTokens:
        """The tokens and sequences, as the kernels around the layers take them."""
        return StepTokens(
            self.token_ids, self.from_pool, self.positions, self.token_slots, self.slots, self.ends,
            self.query_starts,
        )  # fmt: skip

    def sampling_rows(self) -> SamplingRows:
        """The parameters of all rows, as if each were sampled and filtered."""
        return SamplingRows(
            self.temperature, self.top_k, self.top_p, self.min_p, self.keys, filtered=True
        )


class HostWords:
    """The same words on the host, where a step writes them before they are sent.

    Args:
        spare: the row of the tables that padding names.
    """

    def __init__(self, bucket: Bucket, spare: int) -> None:
        T, S = bucket.tokens, bucket.sequences
        self._bucket = bucket
        self._words = np.zeros(num_words(bucket), np.int64)
        tokens, sequences, self._starts = np.split(
            self._words, [_TOKEN_ROWS * T, _TOKEN_ROWS * T + _SEQUENCE_ROWS * S]
        )
        self._tokens, self._sequences = tokens.reshape(-1, T), sequences.reshape(-1, S)
        self._keys = self._sequences[5]
        self._temperature, self._top_p = self._sequences[6].view(np.float32).reshape(2, S)
        self._min_p = self._sequences[7].view(np.float32)
        self._tokens[3] = spare
        self._sequences[0] = spare
        self._sequences[3] = 1  # greedy
        self._sequences[4] = _NO_TOP_K  # a filter would be looked for in every row of padding
        self._sequences[6].view(np.float32)[:] = 1.0
        if bucket.decode:  # a padding sequence has a row in a decode step, and none in a mixed one
            self._starts[:] = np.arange(S + 1)
        self.padding = self._words.copy()
        """The words of a step of nothing."""

    def write(self, work: Columns, table: SlotTable, params: ParamTable) -> Ids:
        """The words of a step, until the next call."""
        np.copyto(self._words, self.padding)
        table.make_room(int(work.ends.max()))
        if self._bucket.decode:
            self._write_tokens(work.slots, work.starts, table)
            self._sequences[2, : len(work.slots)] = self._starts[: len(work.slots)]
        else:
            self._write_chunks(work, table)
        self._write_sequences(work, params)
        return self._words

    def _write_chunks(self, work: Columns, table: SlotTable) -> None:
        """The tokens of chunks of any length, and where those begin and end."""
        count = len(work.slots)
        first = np.zeros(count + 1, np.int64)
        np.cumsum(work.counts, out=first[1:])
        total = int(first[-1])
        positions = np.arange(total) - np.repeat(first[:-1] - work.starts, work.counts)
        self._write_tokens(np.repeat(work.slots, work.counts), positions, table)
        self._sequences[2, :count] = first[1:] - 1
        self._starts[: count + 1] = first
        self._starts[count + 1 :] = total

    def _write_tokens(self, slots: Ids, positions: Ids, table: SlotTable) -> None:
        """Tokens that are not known yet are looked up on the device."""
        rows = self._tokens[:, : len(slots)]
        rows[0] = table.tokens[slots, positions]
        rows[1] = positions >= table.known[slots]
        rows[2] = positions
        rows[3] = slots

    def _write_sequences(self, work: Columns, p: ParamTable) -> None:
        slots, count = work.slots, len(work.slots)
        rows, greedy = self._sequences[:, :count], p.greedy[slots]
        rows[0] = slots
        rows[1] = work.ends
        rows[3] = greedy
        if greedy.all():  # nobody draws: what follows is not read
            return
        rows[4] = p.top_k[slots]
        self._keys[:count] = p.keys(slots, work.ends).view(np.int64).ravel()
        self._temperature[:count], self._top_p[:count] = p.temperature[slots], p.top_p[slots]
        self._min_p[:count] = p.min_p[slots]


def num_words(bucket: Bucket) -> int:
    """Length of a bucket's run."""
    return _TOKEN_ROWS * bucket.tokens + (_SEQUENCE_ROWS + 1) * bucket.sequences + 1
