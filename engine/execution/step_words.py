"""A bucket's inputs as one run of 64-bit words, so that a step's inputs are one copy.

The whole run is written for each step, padding included. A padding token writes no KV (its slot is
the spare row of the tables); a padding sequence has kv_len 0. What follows from these words by
arithmetic (positions in blocks, block tables) is computed on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tokenfleet.engine.execution.buckets import Bucket
from tokenfleet.engine.execution.param_table import ParamTable
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.scheduling.plan import Chunk
from tokenfleet.kernels.rng import row_keys
from tokenfleet.kernels.sampling import SamplingRows
from tokenfleet.kernels.step import StepTokens

Ids = NDArray[np.int64]

_TOKEN_ROWS, _SEQUENCE_ROWS = 4, 8


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


def num_words(bucket: Bucket) -> int:
    """Length of a bucket's run."""
    return _TOKEN_ROWS * bucket.tokens + (_SEQUENCE_ROWS + 1) * bucket.sequences + 1


def step_words(
    bucket: Bucket, work: list[Chunk], table: SlotTable, params: ParamTable
) -> tuple[Ids, Ids, Ids]:
    """(words, slots [S], ends [S]) of a step's chunks, those of one token first."""
    count, spare = len(work), table.tokens.shape[0]
    slots = np.fromiter((c.sequence.slot for c in work), np.int64, count)
    starts = np.fromiter((c.start for c in work), np.int64, count)
    counts = np.fromiter((c.count for c in work), np.int64, count)
    known = np.fromiter((len(c.sequence.tokens) for c in work), np.int64, count)
    ends = starts + counts
    table.make_room(int(ends.max()))
    first = np.zeros(count + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    total = int(first[-1])
    owner = np.repeat(np.arange(count), counts)
    positions = np.arange(total) - (first[:-1] - starts)[owner]

    words, of_token, of_sequence, query_starts = _padding(bucket, spare)
    of_token[0, :total] = table.tokens[slots[owner], positions]
    of_token[1, :total] = positions >= known[owner]
    of_token[2, :total] = positions
    of_token[3, :total] = slots[owner]
    _write_sequences(of_sequence, slots, ends, first, params)
    query_starts[: count + 1] = first
    if not bucket.decode:
        query_starts[count + 1 :] = total
    return words, slots, ends


def padding_words(bucket: Bucket, num_slots: int) -> Ids:
    """The words of a step of nothing."""
    return _padding(bucket, num_slots)[0]


def _padding(bucket: Bucket, spare: int) -> tuple[Ids, Ids, Ids, Ids]:
    """(words, and their parts: of tokens, of sequences, starts), all of it padding.

    A padding sequence has a row in a decode step, and none in a mixed one.
    """
    T, S = bucket.tokens, bucket.sequences
    words = np.zeros(num_words(bucket), np.int64)
    of_token, rest = np.split(words, [_TOKEN_ROWS * T])
    of_sequence, starts = np.split(rest, [_SEQUENCE_ROWS * S])
    of_token, of_sequence = of_token.reshape(-1, T), of_sequence.reshape(-1, S)
    of_token[3] = spare
    of_sequence[0] = spare
    of_sequence[3:5] = 1  # greedy, top-k of one
    of_sequence[6].view(np.float32)[:] = 1.0
    if bucket.decode:
        starts[:] = np.arange(S + 1)
    return words, of_token, of_sequence, starts


def _write_sequences(rows: Ids, slots: Ids, ends: Ids, first: Ids, p: ParamTable) -> None:
    count, S = len(slots), rows.shape[1]
    rows[0, :count] = slots
    rows[1, :count] = ends
    rows[2, :count] = first[1:] - 1
    rows[3, :count] = p.greedy[slots]
    if p.greedy[slots].all():  # nobody draws: what follows is not read
        return
    rows[4, :count] = p.top_k[slots]
    keys = row_keys(p.seed[slots], p.choice[slots], ends - p.num_prompt[slots])
    rows[5, :count] = keys.view(np.int64).ravel()
    temperature, top_p = rows[6].view(np.float32).reshape(2, S)
    temperature[:count], top_p[:count] = p.temperature[slots], p.top_p[slots]
    rows[7].view(np.float32)[:count] = p.min_p[slots]
