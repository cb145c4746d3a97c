"""Triton form of row.py: a product of one row is a reading of its weight, and nothing else counts.

A program sums a few outputs. Its weights come by asynchronous copies, several tiles ahead of the
sums, and are not kept in the caches: nobody reads them again before the next step. The norm in
front needs no pass of its own: its factor is one number for the row, multiplied at the end, and its
sum of squares is made from the same values that are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.registry import Example

TILE_BYTES = 1024
"""Of one weight row that a program reads at a time."""
ROWS = 8
"""Weight rows of a program, gates and ups alike; half of them where programs are few."""
STAGES = 4
"""Tiles of 8 KB of which all but one are on their way: with six programs a multiprocessor that is
several times what its share of the bandwidth times the latency asks for."""


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Tensor | None,
    eps: float,
    offset: float,
    add: Tensor | None,
    gate: str | None,
) -> Tensor:
    """See row.py; gate: "silu", "gelu_tanh" or None."""
    K, N = weight.shape[1], weight.shape[0] // (2 if gate else 1)
    out = torch.empty((1, N), dtype=x.dtype, device=x.device)
    rows = ROWS if not gate else ROWS // 2
    if triton.cdiv(N, rows) < 2 * gpu_of(x.device).num_sms:
        rows //= 2
    tile, early = TILE_BYTES // weight.itemsize, gpu_of(x.device).early
    launch(
        _row, (triton.cdiv(N, rows),), x.contiguous(), norm, weight, bias, add, out, N, K, eps,
        offset, GATE=gate or "none", EVEN=K % tile == 0, TILE_N=rows, TILE_K=tile, STAGES=STAGES,
        EARLY=early, early=early, num_warps=4,
    )  # fmt: skip
    return out


def examples(device: torch.device) -> Iterator[Example]:
    """The products of an 8B model's decode of one sequence, and the smallest of a 0.6B one."""
    shapes = [
        ("qkv", 6144, 4096), ("out", 4096, 4096), ("gate_up", 12288, 4096), ("down", 4096, 12288),
        ("head", 151936, 4096), ("out", 1024, 2048), ("gate_up", 3072, 1024),
    ]  # fmt: skip
    for what, N, K in shapes:
        x = torch.zeros((1, K), dtype=torch.bfloat16, device=device)
        weight = torch.zeros(
            (2 * N if what == "gate_up" else N, K), dtype=torch.bfloat16, device=device
        )
        normed = what in ("qkv", "gate_up")
        norm = torch.zeros(K, dtype=torch.bfloat16, device=device) if normed else None
        residual = torch.zeros((1, N), dtype=torch.bfloat16, device=device)
        add = residual if what in ("out", "down") else None
        gate = "silu" if what == "gate_up" else None

        def run(
            x: Tensor = x, weight: Tensor = weight, norm: Tensor | None = norm,
            add: Tensor | None = add, gate: str | None = gate,
        ) -> None:  # fmt: skip
            row_linear(x, weight, None, norm=norm, eps=1e-6, offset=0.0, add=add, gate=gate)

        moved = weight.nbytes + x.nbytes + residual.nbytes
        yield Example(f"row_linear {what} bf16 {K}x{N}", run, moved, 2 * weight.numel())


@triton.jit
def _row(
    x, norm, weight, bias, add, out, N, K, eps, offset,
    GATE: tl.constexpr, EVEN: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    inside = n < N
    k = tl.arange(0, TILE_K)
    first = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    second = first + N.to(tl.int64) * K
    total = tl.zeros((TILE_N, TILE_K), tl.float32)
    ups = tl.zeros((TILE_N, TILE_K), tl.float32)
    squares = tl.zeros((TILE_K,), tl.float32)
    for start in tl.range(0, K, TILE_K, num_stages=STAGES):
        read, deep = inside[:, None], k < K
        if not EVEN:
            deep = start + k < K
            read = inside[:, None] & deep[None, :]
        w = tl.load(first + start, mask=read, other=0.0, eviction_policy="evict_first")
        a = tl.load(x + start + k, mask=deep, other=0.0).to(tl.float32)
        if norm is not None:
            squares += a * a
            a = a * (tl.load(norm + start + k, mask=deep, other=0.0).to(tl.float32) + offset)
        total += w.to(tl.float32) * a[None, :]
        if GATE != "none":
            u = tl.load(second + start, mask=read, other=0.0, eviction_policy="evict_first")
            ups += u.to(tl.float32) * a[None, :]
    factor = 1.0
    if norm is not None:
        factor = tl.math.rsqrt(tl.sum(squares, 0) / K + eps)
    result = tl.sum(total, 1) * factor
    if bias is not None:
        result += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATE != "none":
        up = tl.sum(ups, 1) * factor
        if bias is not None:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
        if GATE == "silu":
            opened = result * tl.sigmoid(result)
        else:  # (1 + tanh(u)) / 2 = sigmoid(2 u)
            cube = result * result * result
            opened = result * tl.sigmoid(1.5957691216057308 * (result + 0.044715 * cube))
        result = opened * up
    if add is not None:
        result += tl.load(add + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=inside)
