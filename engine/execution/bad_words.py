"""Which tokens would complete a forbidden sequence of tokens.

A word is forbidden by its last token alone, and only where its other tokens stand directly before;
so a word of one token is never chosen at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenfleet.engine.execution.columns import Ids

_ANY, _NONE = -1, -2
"""No token: matches all; matches nothing."""


@dataclass(frozen=True, slots=True)
class BadWords:
    """The words of one sequence, compared all at once."""

    heads: Ids
    """[W, L]: all tokens of a word but the last, behind as many _ANY as it is shorter."""
    lasts: Ids
    """[W]."""

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> BadWords:
        """Of token sequences, none of them empty."""
        length = max((len(word) for word in words), default=1) - 1
        heads = [[_ANY] * (length + 1 - len(word)) + list(word[:-1]) for word in words]
        lasts = np.array([word[-1] for word in words], np.int64)
        return cls(np.array(heads, np.int64).reshape(len(words), length), lasts)

    def next_of(self, tokens: NDArray[np.int32]) -> Ids:
        """Tokens [N] that may not follow these, of which the last L are looked at."""
        length = self.heads.shape[1]
        tail = np.full(length, _NONE, np.int64)
        if length:
            known = tokens[-length:]
            tail[length - len(known) :] = known
        hits = ((self.heads == tail) | (self.heads == _ANY)).all(1)
        return np.unique(self.lasts[hits])
