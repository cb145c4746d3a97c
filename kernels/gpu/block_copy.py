"""Triton form of block_copy.py: a program moves a piece of one block, keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.launch import launch
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.paged_attention import KVPool

TILE = 2048


def copy_blocks(pool: KVPool, sources: Tensor, targets: Tensor) -> None:
    """See block_copy.py. The values of one block are contiguous."""
    k, v = (x if x.itemsize > 1 else x.view(torch.uint8) for x in (pool.k, pool.v))
    values = k[0].numel()
    grid = (sources.numel(), triton.cdiv(values, TILE))
    launch(
        _copy, grid, k, v, sources, targets, k.stride(0), v.stride(0), sources.stride(0),
        targets.stride(0), VALUES=values, TILE=TILE, num_warps=4,
    )  # fmt: skip


def examples(device: torch.device) -> Iterator[Example]:
    """One layer's share of copying 32 blocks."""
    for dtype, common in ((torch.bfloat16, True), (torch.float8_e4m3fn, False)):
        k, v = (torch.zeros((65, 8, 16, 128), dtype=dtype, device=device) for _ in "kv")
        blocks = torch.arange(1, 65, device=device)

        def run(k: Tensor = k, v: Tensor = v, blocks: Tensor = blocks) -> None:
            copy_blocks(KVPool(k, v), blocks[:32], blocks[32:])

        moved = 4 * 32 * k[0].nbytes
        yield Example(f"copy_blocks 32x8x16x128 {dtype}", run, moved_bytes=moved, common=common)


@triton.jit(
    # of a single pair the strides may be anything
    do_not_specialize=["source_stride", "target_stride"],
    do_not_specialize_on_alignment=["sources", "targets"],
)
def _copy(
    k, v, sources, targets, k_stride, v_stride, source_stride, target_stride,
    VALUES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    source = tl.load(sources + pair * source_stride)
    target = tl.load(targets + pair * target_stride)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < VALUES
    if target < 0:
        return
    keys = tl.load(k + source * k_stride + at, mask=inside, other=0.0)
    values = tl.load(v + source * v_stride + at, mask=inside, other=0.0)
    tl.store(k + target * k_stride + at, keys, mask=inside)
    tl.store(v + target * v_stride + at, values, mask=inside)
