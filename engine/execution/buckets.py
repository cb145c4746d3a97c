"""The sizes for which graphs are captured.

A step runs in the smallest bucket that has room for it, the rest of which is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_GRAPHED_TOKENS = 1024
"""Of a mixed step; a larger one keeps the device busy for longer than its launches take."""
_LEAST_MIXED = 32


@dataclass(frozen=True, slots=True)
class Bucket:
    """Room for so many tokens of so many sequences."""

    tokens: int
    sequences: int
    decode: bool
    """Each sequence has exactly one token."""


def decode_buckets(max_num_seqs: int) -> list[Bucket]:
    """1, 2, 4, then multiples of 8, of 16 above 256; `max_num_seqs` is always the last."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs, 16)]
    sizes = [size for size in sizes if size < max_num_seqs]
    return [Bucket(size, size, decode=True) for size in [*sizes, max_num_seqs]]


def mixed_buckets(max_num_batched_tokens: int, max_num_seqs: int) -> list[Bucket]:
    """Doubling numbers of tokens up to the token budget, each for any number of sequences."""
    most = min(max_num_batched_tokens, MOST_GRAPHED_TOKENS)
    sizes = []
    size = _LEAST_MIXED
    while size < most:
        sizes.append(size)
        size *= 2
    return [Bucket(size, max_num_seqs, decode=False) for size in [*sizes, most]]
