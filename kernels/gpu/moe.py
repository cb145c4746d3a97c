"""Triton form of moe.py: one launch for all experts.

The grid has room for every expert's last, partial tile; a program finds its expert by the tiles
that the experts before it fill, and one beyond the last tile ends at once. So nothing has to be
known on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenfleet.kernels.fp8 import FP8, Fp8Rows, Fp8Scales, quantize_inputs
from tokenfleet.kernels.gpu.fp8 import empty_rows, make_scales
from tokenfleet.kernels.gpu.launch import gpu_of, launch
from tokenfleet.kernels.gpu.product import operand_arguments, pick_tiles, scaled, sum_of_products
from tokenfleet.kernels.gpu.registry import Example
from tokenfleet.kernels.moe import ExpertWeights, Visits, sort_visits


def expert_product(
    x: Tensor | Fp8Rows, weights: ExpertWeights, visits: Visits, *, entering: bool
) -> Tensor:
    """See moe.py."""
    scales = weights.fp8
    if scales is not None and scales.activations != "none" and isinstance(x, Tensor):
        x = quantize_inputs(x, scales)
    if isinstance(x, Tensor) and x.stride(1) != 1:
        x = x.contiguous()
    values = x.codes if isinstance(x, Fp8Rows) else x
    E, N, K = weights.data.shape
    rows = visits.order.numel()
    gpu = gpu_of(values.device)
    tiles = pick_tiles(gpu, x, weights.data, triton.cdiv(rows, E))
    out = torch.empty((rows, N), dtype=x.dtype, device=values.device)
    operands, constants = operand_arguments(x, weights.data, scales, gpu)
    # every expert may have one partial tile, and no more experts have one than there are rows
    most = rows // tiles.m + min(E, rows)
    launch(
        _expert_product, (most, triton.cdiv(N, tiles.n)), *operands, visits.order, visits.starts,
        out, N, E, scales.weight.shape[0] // E if scales else 0, **constants,
        TOP_K=visits.top_k, ENTERING=entering, EVEN=K % tiles.k == 0,
        EXPERTS=triton.next_power_of_2(E), TILE_M=tiles.m, TILE_N=tiles.n, TILE_K=tiles.k,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def examples(device: torch.device) -> Iterator[Example]:
    """The experts of Qwen3-30B-A3B (128, of which 8 are visited): decodes and a chunk."""
    E, K, N, top_k, bf16 = 128, 2048, 1536, 8, torch.bfloat16
    for tokens in (1, 32, 4096):
        x = torch.zeros((tokens, K), dtype=bf16, device=device)
        # as evenly as it can be: so many experts are read as are counted
        chosen = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % E
        visits = sort_visits(chosen, E)
        read = min(E, tokens * top_k) * N * K
        for form in ("bf16", "fp8 blocks", "fp8 rows"):
            given: Tensor | Fp8Rows = x
            weights = ExpertWeights(torch.zeros((E, N, K), dtype=bf16, device=device))
            if form != "bf16":
                block = form == "fp8 blocks"
                scales: Fp8Scales = make_scales(K, E * N, "token", device, block=block)
                given = empty_rows(tokens, K, scales, x)
                codes = torch.zeros((E, N, K), dtype=torch.uint8, device=device).view(FP8)
                weights = ExpertWeights(codes, scales)

            def run(
                x: Tensor | Fp8Rows = given, w: ExpertWeights = weights, v: Visits = visits
            ) -> None:
                expert_product(x, w, v, entering=True)

            size = weights.data.itemsize
            flops, moved = 2 * tokens * top_k * N * K, size * read + 2 * tokens * top_k * N
            common = tokens != 32 and form != "fp8 rows"
            name = f"experts {form} {tokens}x{top_k}x{K}x{N}"
            yield Example(name, run, moved, flops, common=common)


@triton.jit
def _expert_product(
    x, weight, x_scale, w_scale, columns, x_stride, x_scale_stride, x_group_stride, w_scale_stride,
    order, starts, out, N, num_experts, scale_rows_each,
    SCALES: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr, TOP_K: tl.constexpr, ENTERING: tl.constexpr, EVEN: tl.constexpr,
    EXPERTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    first = tl.load(starts + expert, mask=real, other=0)
    end = tl.load(starts + expert + 1, mask=real, other=0)
    tiles = tl.cdiv(end - first, TILE_M)
    before = tl.cumsum(tiles, 0) - tiles
    mine = real & (before <= tile) & (tile < before + tiles)  # true for one expert, or for none
    if tl.sum(mine.to(tl.int32)) > 0:
        begin = tl.sum(tl.where(mine, first + (tile - before) * TILE_M, 0))
        last = tl.sum(tl.where(mine, end, 0))
        chosen = tl.sum(tl.where(mine, expert, 0)).to(tl.int64)
        row = begin + tl.arange(0, TILE_M)
        row_inside = row < last
        visit = tl.load(order + row, mask=row_inside, other=0)
        n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
        n_inside = n < N
        if ENTERING:
            source = (visit // TOP_K).to(tl.int64)
            target = row.to(tl.int64)
        else:
            source = row.to(tl.int64)
            target = visit.to(tl.int64)
        x_scale_row = source * x_scale_stride
        w_scale_row = (chosen * scale_rows_each + n // SCALE_ROWS) * w_scale_stride
        total = sum_of_products(
            x, weight, x_scale, w_scale, columns, 0, columns,
            source * x_stride, (chosen * N + n) * columns, x_scale_row, w_scale_row,
            row_inside, n_inside, x_group_stride,
            SCALES, SCALE_COLUMNS, NATIVE, EVEN, TILE_M, TILE_N, TILE_K,
        )  # fmt: skip
        total = scaled(
            total, x_scale, w_scale, x_scale_row, w_scale_row, row_inside, n_inside, SCALES
        )
        place = target[:, None] * N + n[None, :]
        tl.store(
            out + place,
            total.to(out.dtype.element_ty),
            mask=row_inside[:, None] & n_inside[None, :],
        )
