"""Steps that are replayed from graphs instead of being launched operation by operation.

One graph a bucket goes from a step's words to the hidden state of each sequence's last token; two
more a bucket go on to a token, one for greedy rows alone and one for any draw. A step whose rows
ask for more than temperature, top-k, top-p and min-p is sampled outside of them. Everything that a
graph reads or writes is allocated once and keeps its address.

The block tables lie on the device and are changed where a plan changed them, so a decode step sends
a few words a sequence, whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenfleet.engine.execution.buckets import Bucket
from tokenfleet.engine.execution.capture import Capture, Work
from tokenfleet.engine.execution.columns import Columns
from tokenfleet.engine.execution.param_table import ParamTable
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.execution.step_words import HostWords, StepWords
from tokenfleet.engine.execution.transfers import Transfers
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.scheduling.plan import StepPlan
from tokenfleet.kernels.paged_attention import AttentionBatch, KVPool
from tokenfleet.kernels.sampling import sample_unread
from tokenfleet.kernels.step import look_up, settle
from tokenfleet.kernels.token_pool import scatter_tokens


class DeviceTables:
    """The slots' block tables on the device, int32 [slots + 1, blocks of max_len].

    The last row is spare: padding points at it, and it names the null block only. What stands
    behind the end of a row is left from an earlier sequence and never looked at.
    """

    def __init__(self, num_slots: int, max_blocks: int, transfers: Transfers, device: torch.device):
        self.blocks = torch.zeros((num_slots + 1, max_blocks), dtype=torch.int32, device=device)
        self._send = transfers.send

    def update(self, plan: StepPlan) -> None:
        """Bring the rows up to the plan; again after a part of it does no harm."""
        width = self.blocks.shape[1]
        places: list[int] = []
        values: list[int] = []
        admitted = [(sequence, 0) for sequence in plan.admitted if sequence.slot >= 0]
        for sequence, first in admitted + plan.grown:
            changed = sequence.block_table[first:]
            begin = sequence.slot * width + first
            places += range(begin, begin + len(changed))
            values += changed
        if places:
            where = self._send(np.array(places, np.int64))
            self.blocks.view(-1).index_copy_(0, where, self._send(np.array(values, np.int32)))


@dataclass(frozen=True, slots=True)
class _Replays:
    """What one bucket's step is made of."""

    inputs: HostWords
    words: StepWords
    forward: Work
    best: Work
    drawn: Work


class StepGraphs:
    """Captures every bucket when it is made, the largest first; one step at a time runs in it.

    Args:
        newest: int64 [slots + 1], the token sampled last for each slot; the last row is spare.
        unknown: ids that the tokenizer does not have, int64.
    """

    def __init__(
        self,
        decoder: Decoder,
        pools: Items[KVPool],
        buckets: Items[Bucket],
        *,
        tables: DeviceTables,
        newest: Tensor,
        unknown: Tensor | None,
        max_len: int,
        transfers: Transfers,
        capture: Capture,
    ) -> None:
        self._decoder, self._pools = decoder, pools
        self.tables = tables
        self._newest, self._unknown = newest, unknown
        self._max_len, self._transfers = max_len, transfers
        most = max(bucket.sequences for bucket in buckets)
        shape = (most, decoder.spec.hidden_size)
        self.hidden = torch.zeros(shape, dtype=decoder.dtype, device=newest.device)
        """Of each sequence's last token, after `forward`."""
        self.last_ids = newest.new_zeros(most)
        """That token, after `forward`."""
        self.verdicts = newest.new_zeros(most)
        """After `sample`."""
        self._replays: dict[Bucket, _Replays] = {}
        for bucket in sorted(buckets, key=lambda b: (b.tokens, b.sequences), reverse=True):
            self._replays[bucket] = self._captured(bucket, capture)
        self._decodes = sorted((b for b in buckets if b.decode), key=lambda b: b.sequences)
        self._mixed = sorted((b for b in buckets if not b.decode), key=lambda b: b.tokens)

    def pick(self, columns: Columns) -> Bucket | None:
        """The bucket for these chunks; None when they are more than any has room for."""
        if columns.single:
            count = len(columns.slots)
            return next((b for b in self._decodes if b.sequences >= count), None)
        total = int(columns.counts.sum())
        return next((b for b in self._mixed if b.tokens >= total), None)

    def fill(self, bucket: Bucket, work: Columns, table: SlotTable, params: ParamTable) -> None:
        """Write a step's words."""
        replays = self._replays[bucket]
        self._transfers.refill(replays.words.data, replays.inputs.write(work, table, params))

    def forward(self, bucket: Bucket) -> None:
        """From the words to `hidden` and `last_ids`; KV is written."""
        self._replays[bucket].forward()

    def sample(self, bucket: Bucket, *, drawn: bool) -> None:
        """From `hidden` to `verdicts`; the tokens become the newest ones of their slots."""
        replays = self._replays[bucket]
        (replays.drawn if drawn else replays.best)()

    def unsample(self, bucket: Bucket) -> None:
        """Make the tokens that `sample` replaced the newest ones again: the step did not get out,
        and will be tried again."""
        words = self._replays[bucket].words
        slots = words.slots.masked_fill(words.ends == 0, -1)
        scatter_tokens(self.last_ids[: bucket.sequences], self._newest, slots)

    # -- what is captured ------------------------------------------------------------------

    def _captured(self, bucket: Bucket, capture: Capture) -> _Replays:
        words = StepWords(bucket, self._newest.device)
        inputs = HostWords(bucket, self._newest.shape[0] - 1)
        # a step of nothing: no KV is written while kernels warm up
        self._transfers.refill(words.data, inputs.padding)
        return _Replays(
            inputs,
            words,
            capture(lambda: self._forward(words)),
            capture(lambda: self._sample(words, drawn=False)),
            capture(lambda: self._sample(words, drawn=True)),
        )

    def _forward(self, words: StepWords) -> None:
        bucket, size = words.bucket, self._pools[0].block_size
        places = look_up(words.step_tokens(), self._newest, self.tables.blocks, size)
        batch = AttentionBatch(
            query_starts=places.query_starts,
            kv_lens=places.kv_lens,
            block_tables=places.block_tables,
            slots=places.kv_slots,
            positions=words.positions,
            num_decodes=bucket.sequences if bucket.decode else 0,
            max_query_len=1 if bucket.decode else bucket.tokens,
            max_kv_len=self._max_len,
        )
        hidden = self._decoder.forward(places.ids, batch, self._pools)
        S = bucket.sequences
        torch.index_select(hidden, 0, words.last_rows, out=self.hidden[:S])
        torch.index_select(places.ids, 0, words.last_rows, out=self.last_ids[:S])

    def _sample(self, words: StepWords, *, drawn: bool) -> None:
        S = words.bucket.sequences
        hidden = self.hidden[:S]
        logits = self._decoder.logits(hidden)
        if self._unknown is not None:
            logits.index_fill_(1, self._unknown, -torch.inf)
        found = sample_unread(logits, words.sampling_rows()) if drawn else None
        settle(
            logits, hidden, found, words.greedy, words.slots, words.ends, self._newest,
            self.verdicts[:S],
        )  # fmt: skip
