"""Triton form of token_mask.py: a lane a token; what is allowed is neither read nor written."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.gpu.launch import launch
from tokenfleet.kernels.gpu.registry import Example

TILE = 4096


def allow_only(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See token_mask.py."""
    words = words.contiguous()
    V, count = logits.shape[1], words.shape[1]
    launch(
        _allow_only, (len(rows), triton.cdiv(V, TILE)), logits, rows.contiguous(), words,
        V, logits.stride(0), count, TILE=TILE, num_warps=4,
    )  # fmt: skip


def examples(device: torch.device) -> Iterator[Example]:
    """Every row of 32 under a grammar."""
    R, V = 32, 151936
    logits = torch.zeros((R, V), dtype=torch.float32, device=device)
    rows = torch.arange(R, device=device)
    words = torch.zeros((R, V // 32), dtype=torch.int32, device=device)

    def run() -> None:
        allow_only(logits, rows, words)

    yield Example(f"allow_only {R}x{V}", run, moved_bytes=logits.nbytes + words.nbytes)


@triton.jit(do_not_specialize=["count"])
def _allow_only(logits, rows, words, V, stride, count, TILE: tl.constexpr):
    masked = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.load(words + masked * count + at // 32, mask=at // 32 < count, other=0)
    forbidden = ((word >> (at % 32)) & 1) == 0
    row = tl.load(rows + masked)
    tl.store(logits + row * stride + at, -float("inf"), mask=forbidden & (at < V))
