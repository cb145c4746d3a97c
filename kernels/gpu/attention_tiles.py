"""How attention is cut into programs: rows and keys of a tile, and parts of the keys.

Invariant: what is picked depends on shapes and longest lengths alone, so that nothing has to wait
for the device, and a captured graph serves every shorter length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from tokenfleet.kernels.gpu.launch import Gpu

MAX_SPLITS = 32
SPLIT_TOKENS = 128
"""A split of fewer tokens costs more in joining than it gains."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and keys of a program's tile, and how it is launched."""

    m: int
    n: int
    num_warps: int
    num_stages: int


CHUNK_TILES = {
    # (generation, head dimension rounded up): not measured yet; what fits without spills
    (80, 64): Tiles(128, 64, 8, 3),
    (80, 128): Tiles(128, 32, 8, 3),
    (80, 256): Tiles(64, 32, 8, 2),
    (90, 64): Tiles(128, 128, 8, 3),
    (90, 128): Tiles(128, 128, 8, 2),
    (90, 256): Tiles(128, 32, 8, 3),
    (100, 64): Tiles(128, 128, 8, 3),
    (100, 128): Tiles(128, 128, 8, 2),
    (100, 256): Tiles(64, 32, 8, 2),
}
MASKED_CHUNK_TILES = {
    # heads that are padded to 128: the masks take registers too
    80: Tiles(128, 32, 8, 2),
    90: Tiles(128, 64, 8, 3),
    100: Tiles(128, 64, 8, 3),
}
FP8_CHUNK_TILES = {
    # where converting keys and values takes too many registers for the tiles above
    (80, 128): Tiles(64, 32, 8, 2),
    (80, 256): Tiles(32, 32, 8, 2),
    (90, 128): Tiles(128, 64, 8, 3),
    (100, 128): Tiles(128, 64, 8, 3),
}
UNEVEN_CHUNK_TILES = {
    # where a KV head has one query head, or 3, 5, 7: larger tiles do not fit into registers
    # (generation, head dimension rounded up, bytes of a key's value)
    (90, 128, 2): Tiles(128, 64, 8, 3),
    (90, 128, 1): Tiles(128, 64, 8, 2),
}
SMALL_CHUNK_TILES = {
    # for chunks of at most SMALL_CHUNK_ROWS rows, all heads of a KV head together, and for steps
    # of which tiles of CHUNK_ROWS would leave multiprocessors without work
    (80, 64): Tiles(64, 32, 8, 2),
    (80, 128): Tiles(64, 32, 8, 2),
    (80, 256): Tiles(32, 32, 8, 2),
    (90, 64): Tiles(64, 64, 4, 2),
    (90, 128): Tiles(64, 64, 4, 2),
    (90, 256): Tiles(64, 32, 8, 2),
    (100, 64): Tiles(64, 64, 4, 2),
    (100, 128): Tiles(64, 64, 4, 2),
    (100, 256): Tiles(64, 32, 8, 2),
}
SMALL_CHUNK_ROWS = 64
CHUNK_ROWS = 128
"""Of most of the larger tiles."""
DECODE_TILES = {
    # bytes in flight decide: a tile of keys and one of values in every stage
    (80, 64): Tiles(16, 128, 4, 3),
    (80, 128): Tiles(16, 64, 4, 3),
    (80, 256): Tiles(16, 32, 4, 3),
    (90, 64): Tiles(16, 128, 4, 4),
    (90, 128): Tiles(16, 64, 4, 4),
    (90, 256): Tiles(16, 32, 4, 4),
    (100, 64): Tiles(16, 128, 4, 4),
    (100, 128): Tiles(16, 64, 4, 4),
    (100, 256): Tiles(16, 32, 4, 4),
}


def pick_tiles(
    gpu: Gpu, dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, group: int, max_query_len: int,
    all_rows: int,
) -> Tiles:  # fmt: skip
    """The launch of one step. A tile has room for at least one token's heads.

    all_rows: of all tokens and query heads. Where they are few, most tiles are those of decodes
    beside a chunk, with `group` rows each: smaller tiles waste less on them, and make more programs
    of the chunk.
    """
    least = max(16, triton.next_power_of_2(group))
    padded = min(256, max(64, triton.next_power_of_2(dim)))
    if dtype == torch.float32:  # not for speed: products of three tf32 parts
        return Tiles(least, 32, 4, 1)
    rows, key = max_query_len * group, (gpu.arch, padded)
    odd = group == 1 or group & (group - 1)
    uneven = UNEVEN_CHUNK_TILES.get((*key, kv_dtype.itemsize)) if odd else None
    if rows <= least:
        tiles = DECODE_TILES[key]
    elif rows <= SMALL_CHUNK_ROWS or all_rows < CHUNK_ROWS * gpu.num_sms:
        tiles = SMALL_CHUNK_TILES[key]
    elif uneven is not None:
        tiles = uneven
    elif kv_dtype.itemsize == 1 and key in FP8_CHUNK_TILES:
        tiles = FP8_CHUNK_TILES[key]
    elif 64 < dim < 128:
        tiles = MASKED_CHUNK_TILES[gpu.arch]
    else:
        tiles = CHUNK_TILES[key]
    return Tiles(max(tiles.m, least), tiles.n, tiles.num_warps, tiles.num_stages)


def pick_splits(
    gpu: Gpu, programs: int, max_kv_len: int, window: int | None, least: int = SPLIT_TOKENS
) -> int:
    """How many programs share a tile's keys: a power of two, so that few kernels exist.

    least: tokens of a split.
    """
    longest = max_kv_len if window is None else min(max_kv_len, window)
    most = min(2 * gpu.num_sms // max(programs, 1), longest // least, MAX_SPLITS)
    return 1 << max(most, 1).bit_length() - 1
