"""Sampling parameters of the running sequences, as numpy columns indexed by slot.

Written once per admission; a step picks its rows with one look-up per column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenfleet.engine.constraints import Constraint
from tokenfleet.engine.execution.bad_words import BadWords
from tokenfleet.engine.execution.columns import Ids
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.scheduling.sequence import Sequence
from tokenfleet.kernels.rng import keys_at, streams

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scattered:
    """Entries of a sparse [rows, vocabulary] matrix."""

    rows: Ids
    ids: Ids
    values: Floats

    def where(self, mask: NDArray[np.bool_]) -> Scattered:
        """Some of the entries."""
        return Scattered(self.rows[mask], self.ids[mask], self.values[mask])


class ParamTable:
    """Columns over slots; `top_k` is the vocabulary size where it is off."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.greedy = np.ones(num_slots, bool)
        self.filtered = np.zeros(num_slots, bool)
        self.penalised = np.zeros(num_slots, bool)
        self.adjusted = np.zeros(num_slots, bool)
        """Rows with a bias or a minimum length."""
        self.limited = np.zeros(num_slots, bool)
        """Rows with allowed tokens or bad words."""
        self.special = np.zeros(num_slots, bool)
        """Rows that ask for more than temperature, top-k, top-p and min-p."""
        self.logprobs = np.full(num_slots, -1, np.int64)
        self.processed = np.zeros(num_slots, bool)
        self.lists_prompt = np.zeros(num_slots, bool)
        """Rows whose prompt's own tokens may be listed."""
        self.temperature = np.ones(num_slots, np.float32)
        self.top_k = np.full(num_slots, vocab_size, np.int64)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.repetition = np.ones(num_slots, np.float32)
        self.noise = np.zeros(num_slots, np.uint64)
        """Which stream of random numbers a row draws from: its seed and choice."""
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.min_tokens = np.zeros(num_slots, np.int64)
        self.constrained = np.zeros(num_slots, bool)
        self.constraint: dict[int, Constraint] = {}
        self._bias: dict[int, tuple[Ids, Floats]] = {}
        self._ending: dict[int, tuple[Ids, Floats]] = {}
        self._allowed: dict[int, tuple[Ids, Floats]] = {}
        """No entry for a slot in which all tokens are allowed."""
        self._words: dict[int, BadWords] = {}
        self._scattered: tuple[bytes, Scattered, Scattered] | None = None

    def admit(self, sequence: Sequence) -> None:
        """Fill the row of a sequence that just got its slot."""
        slot, params = sequence.slot, sequence.params
        self._admit_draw(slot, params)
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.penalised[slot] = params.penalised
        seed, choice = np.array([sequence.seed % 2**64], np.uint64), np.array([sequence.choice])
        self.noise[slot] = streams(seed, choice)[0]
        self.num_prompt[slot] = sequence.num_prompt
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.processed[slot] = params.logprobs_mode == "processed"
        self.lists_prompt[slot] = params.prompt_logprobs is not None
        self.min_tokens[slot] = params.min_tokens
        self.adjusted[slot] = bool(params.logit_bias) or params.min_tokens > 0
        self._bias[slot] = _as_arrays(params.logit_bias)
        ending = sequence.ending if params.min_tokens else frozenset()
        self._ending[slot] = _as_arrays(dict.fromkeys(ending, 0.0))
        self._scattered = None
        self._admit_limits(slot, params)
        self.constrained[slot] = sequence.constraint is not None
        if sequence.constraint is not None:
            self.constraint[slot] = sequence.constraint
        self.special[slot] = (
            self.penalised[slot]
            or self.adjusted[slot]
            or self.limited[slot]
            or self.constrained[slot]
            or self.logprobs[slot] >= 0
        )

    def keys(self, slots: Ids, ends: Ids) -> NDArray[np.int32]:
        """Keys int32 [R, 2] of what sequences of `ends` [R] tokens draw next."""
        return keys_at(self.noise[slots], ends - self.num_prompt[slots])

    def scattered(self, slots: Ids) -> tuple[Scattered, Scattered]:
        """(biases, tokens forbidden below min_tokens) of a batch of slots.

        Made anew only when the batch is another one than at the last call.
        """
        key = slots.tobytes()
        if self._scattered is None or self._scattered[0] != key:
            bias, ending = _gather(self._bias, slots), _gather(self._ending, slots)
            self._scattered = (key, bias, ending)
        return self._scattered[1], self._scattered[2]

    def allowed(self, slots: Ids) -> Scattered:
        """All tokens of the rows that may choose from a list alone."""
        some = self._allowed
        parts = [(row, some[slot]) for row, slot in enumerate(slots.tolist()) if slot in some]
        return _joined(parts)

    def forbidden(self, slots: Ids, ends: Ids, tokens: NDArray[np.int32]) -> Scattered:
        """Tokens that would complete a bad word of sequences of `ends` [R] tokens.

        Args:
            tokens: [num_slots, width], by slot; those of rows with bad words are all known.
        """
        parts = []
        for row, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist(), strict=True)):
            words = self._words.get(slot)
            if words is not None:
                ids = words.next_of(tokens[slot, :end])
                parts.append((row, (ids, np.zeros(len(ids), np.float32))))
        return _joined(parts)

    def _admit_limits(self, slot: int, params: SamplingParams) -> None:
        self.limited[slot] = params.forbids
        self._allowed.pop(slot, None)
        self._words.pop(slot, None)
        if params.allowed_token_ids is not None:
            self._allowed[slot] = _as_arrays(dict.fromkeys(params.allowed_token_ids, 0.0))
        if params.bad_words:
            self._words[slot] = BadWords.of(params.bad_word_ids)

    def _admit_draw(self, slot: int, params: SamplingParams) -> None:
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self.greedy[slot] = params.greedy
        self.temperature[slot] = 1.0 if params.greedy else params.temperature
        self.top_k[slot] = top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.filtered[slot] = top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def _as_arrays(entries: Mapping[int, float]) -> tuple[Ids, Floats]:
    ids = np.fromiter(entries.keys(), np.int64, len(entries))
    return ids, np.fromiter(entries.values(), np.float32, len(entries))


def _gather(of_slot: dict[int, tuple[Ids, Floats]], slots: Ids) -> Scattered:
    return _joined([(row, of_slot[slot]) for row, slot in enumerate(slots.tolist())])


def _joined(parts: list[tuple[int, tuple[Ids, Floats]]]) -> Scattered:
    """Of rows and their entries."""
    if not parts:
        return _NOTHING
    counts = [len(ids) for _, (ids, _values) in parts]
    rows = np.repeat(np.array([row for row, _ in parts], np.int64), counts)
    ids = np.concatenate([ids for _, (ids, _values) in parts])
    return Scattered(rows, ids, np.concatenate([values for _, (_ids, values) in parts]))


_NOTHING = Scattered(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
