"""A step's chunks as numpy columns, so that what follows is done for all of them at once.

They are made once, when a step is launched; nothing in them changes until it is collected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenfleet.engine.scheduling.plan import Chunk

Ids = NDArray[np.int64]


@dataclass(slots=True)
class Columns:
    """S chunks, those of one token first."""

    slots: Ids
    """Of their sequences."""
    starts: Ids
    counts: Ids
    ends: Ids
    """Tokens computed of each sequence after the step."""
    samples: NDArray[np.bool_]
    """Whether a chunk gives its sequence a token."""
    single: bool
    """Whether each has one token."""


def columns_of(work: list[Chunk]) -> Columns:
    """The columns of these chunks, of which there is at least one."""
    count, single = len(work), work[-1].count == 1
    slots = np.fromiter([chunk.sequence.slot for chunk in work], np.int64, count)
    starts = np.fromiter([chunk.start for chunk in work], np.int64, count)
    if single:
        counts = np.ones(count, np.int64)
    else:
        counts = np.fromiter([chunk.count for chunk in work], np.int64, count)
    samples = np.fromiter([chunk.samples for chunk in work], bool, count)
    return Columns(slots, starts, counts, starts + counts, samples, single)
