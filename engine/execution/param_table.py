"""Sampling parameters of the running sequences, as numpy columns indexed by slot.

Written once per admission; a step picks its rows with one look-up per column.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.scheduling.sequence import Sequence

Ids = NDArray[np.int64]


class ParamTable:
    """Columns over slots; `top_k` is the vocabulary size where it is off."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.greedy = np.ones(num_slots, bool)
        self.filtered = np.zeros(num_slots, bool)
        self.penalised = np.zeros(num_slots, bool)
        self.adjusted = np.zeros(num_slots, bool)
        """Rows with a bias or a minimum length: few, looked at one by one."""
        self.logprobs = np.full(num_slots, -1, np.int64)
        self.processed = np.zeros(num_slots, bool)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_k = np.full(num_slots, vocab_size, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.repetition = np.ones(num_slots, np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.choice = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.min_tokens = np.zeros(num_slots, np.int64)
        self.bias: list[tuple[Ids, NDArray[np.float32]] | None] = [None] * num_slots
        self.ending: list[Ids | None] = [None] * num_slots
        """Tokens that would end the sequence, forbidden while it is shorter than min_tokens."""

    def admit(
        self, sequence: Sequence, params: SamplingParams, seed: int, ending: frozenset[int]
    ) -> None:
        """Fill the row of a sequence that just got its slot."""
        slot = sequence.slot
        self._admit_draw(slot, params)
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.penalised[slot] = params.penalised
        self.seed[slot] = seed % 2**64
        self.choice[slot] = sequence.choice
        self.num_prompt[slot] = sequence.num_prompt
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.processed[slot] = params.logprobs_mode == "processed"
        self.min_tokens[slot] = params.min_tokens
        self.bias[slot] = _as_arrays(params)
        self.ending[slot] = np.array(sorted(ending), np.int64) if params.min_tokens else None
        self.adjusted[slot] = bool(params.logit_bias) or params.min_tokens > 0

    def _admit_draw(self, slot: int, params: SamplingParams) -> None:
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self.greedy[slot] = params.greedy
        self.temperature[slot] = 1.0 if params.greedy else params.temperature
        self.top_k[slot] = top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.filtered[slot] = top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def _as_arrays(params: SamplingParams) -> tuple[Ids, NDArray[np.float32]] | None:
    if not params.logit_bias:
        return None
    ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
    values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
    return ids, values
