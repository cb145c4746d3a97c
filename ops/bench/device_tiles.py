"""Times other tiles, warps and stages than those that ship, where a step spends its time.

Nothing of those tables has been measured; this says which entries to change. Every alternative
computes the same, of zeros. One that does not fit the device is a figure with its error, and fails
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from device_common import Findings, seconds_of

from tokenfleet.engine.execution.capture import CudaGraphCapture
from tokenfleet.kernels.fp8 import FP8
from tokenfleet.kernels.gpu import attention_tiles, linear, registry, row
from tokenfleet.kernels.gpu.attention_tiles import Tiles
from tokenfleet.kernels.gpu.fp8 import empty_rows, make_scales
from tokenfleet.kernels.gpu.launch import TARGETS, Gpu, Launch, gpu_of, recording

BF16 = torch.bfloat16
ROW_SETTINGS = (
    # bytes of a weight row at a time, rows, stages
    (1024, 8, 4), (1024, 8, 6), (1024, 4, 4), (512, 8, 6), (2048, 4, 4), (2048, 8, 3),
)  # fmt: skip
ATTENTION = {
    # which table, for which examples, and what else could stand in it for heads of 128
    "DECODE_TILES": (
        ("decode 1x4096 32/8x128", "row_attention 1x4096 32/8x128 torch.bfloat16",
         "decode 32x4096 32/8x128 fp8 KV"),
        (Tiles(16, 64, 4, 4), Tiles(16, 64, 4, 3), Tiles(16, 64, 2, 4), Tiles(16, 32, 4, 5),
         Tiles(16, 128, 4, 3), Tiles(16, 128, 8, 3)),
    ),
    "CHUNK_TILES": (
        ("prompt 8192 32/8x128",),
        (Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 4, 2),
         Tiles(64, 64, 4, 3)),
    ),
    "SMALL_CHUNK_TILES": (
        ("mixed 64+256 32/8x128",),
        (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2), Tiles(64, 64, 8, 2),
         Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2)),
    ),
}  # fmt: skip
"""The first of each is what ships for sm_90."""
FEW_ROWS = (2, 4, 8, 16, 32, 64)
WEIGHTS = ((6144, 4096), (24576, 4096), (4096, 12288))
"""Outputs and inputs of an 8B model's products."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to do some work."""

    of: str
    way: str
    run: Callable[[], object]
    changes: tuple[tuple[Any, str, Any], ...] = ()
    """(where, name, value): attributes that are others meanwhile, of modules."""
    moved_bytes: int = 0
    flops: int = 0

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Within the block the launches are these."""
        with ExitStack() as stack:
            for where, name, value in self.changes:
                stack.enter_context(patch.object(where, name, value))
            yield


def alternatives(gpu: Gpu, device: torch.device) -> Iterator[Alternative]:
    """All of them, those on which most depends first."""
    return chain(_rows(device), _attention(gpu, device), _few_rows(device), _fp8_rows(device))


def _rows(device: torch.device) -> Iterator[Alternative]:
    for example in registry.examples(device, ["row"]):
        for tile_bytes, rows, stages in ROW_SETTINGS:
            values = {"TILE_BYTES": tile_bytes, "ROWS": rows, "STAGES": stages}
            changes = tuple((row, name, value) for name, value in values.items())
            yield Alternative(
                example.name, f"{tile_bytes} bytes, {rows} rows, {stages} stages", example.run,
                changes, example.moved_bytes, example.flops,
            )  # fmt: skip


def _attention(gpu: Gpu, device: torch.device) -> Iterator[Alternative]:
    for example in registry.examples(device, ["paged_attention", "row_attention"]):
        for table, (names, choices) in ATTENTION.items():
            if example.name.removeprefix("paged_attention ") not in names:
                continue
            for tiles in choices:
                changed = getattr(attention_tiles, table) | {(gpu.arch, 128): tiles}
                yield Alternative(
                    example.name, repr(tiles), example.run, ((attention_tiles, table, changed),),
                    example.moved_bytes, example.flops,
                )  # fmt: skip


def _few_rows(device: torch.device) -> Iterator[Alternative]:
    """Our product of few rows and cuBLAS's: what SKINNY_ROWS could be."""
    for outputs, inputs in WEIGHTS:
        weight = torch.zeros((outputs, inputs), dtype=BF16, device=device)
        for count in FEW_ROWS:
            x = torch.zeros((count, inputs), dtype=BF16, device=device)
            ways: dict[str, Callable[[], object]] = {
                "cuBLAS": lambda x=x, w=weight: torch.nn.functional.linear(x, w),  # type: ignore[misc]
                "ours": lambda x=x, w=weight: linear.product(x, w, None, None),  # type: ignore[misc]
            }
            for way, run in ways.items():
                moved = weight.nbytes + 2 * count * (outputs + inputs)
                size = (moved, 2 * count * outputs * inputs)
                yield Alternative(f"{count} rows bf16 {inputs}x{outputs}", way, run, (), *size)


def _fp8_rows(device: torch.device) -> Iterator[Alternative]:
    """FP8 by rows: torch's product, with and without sums in fewer bits, and ours."""
    outputs, inputs = WEIGHTS[0]
    codes = torch.zeros((outputs, inputs), dtype=torch.uint8, device=device).view(FP8)
    scales = make_scales(inputs, outputs, "token", device)
    for count in (1, 32, 4096):
        x = empty_rows(count, inputs, scales, torch.zeros((1, 1), dtype=BF16, device=device))
        what = f"{count} rows fp8 {inputs}x{outputs}"
        size = (outputs * inputs, 2 * count * outputs * inputs)
        wide = {"scale_a": x.scale, "scale_b": scales.weight.t(), "out_dtype": BF16}
        for fast in (False, True):

            def by_torch(x: Any = x, wide: Any = wide, fast: bool = fast) -> object:
                return torch._scaled_mm(x.codes, codes.t(), **wide, use_fast_accum=fast)

            way = f"torch{', fast sums' if fast else ''}"
            yield Alternative(what, way, by_torch, (), *size)

        def ours(x: Any = x) -> object:
            return linear.product(x, codes, scales, None)

        yield Alternative(what, "ours", ours, (), *size)


def launches_of(one: Alternative, gpu: Gpu) -> list[Launch]:
    """What it would launch of ours."""
    with one.set_up(), recording(gpu) as launches:
        if not one.way.startswith(("cuBLAS", "torch")):
            one.run()
    return launches


def tiles(findings: Findings, device: torch.device) -> None:
    """The time of every alternative, replayed from a graph; then, of each work, the best one and
    how many times as fast as the first it is."""
    found: dict[str, dict[str, float]] = {}
    for one in alternatives(gpu_of(device), device):
        if not findings.time_for(2.0):
            findings.put("stopped", before=f"{one.of}: {one.way}")
            break
        try:
            with one.set_up():
                took = seconds_of(CudaGraphCapture(device)(one.run), device, least_s=0.03)
        except Exception as error:  # noqa: BLE001  # it may want more memory than there is
            findings.put("tile", of=one.of, way=one.way, error=repr(error)[:300])
            continue
        found.setdefault(one.of, {})[one.way] = took
        figures = {"us": took * 1e6, "gb_s": one.moved_bytes / took / 1e9}
        findings.put("tile", of=one.of, way=one.way, **figures, tflop_s=one.flops / took / 1e12)
    for of, times in found.items():
        best, first = min(times, key=lambda way: times[way]), next(iter(times))
        findings.put("best", of=of, way=best, against=first, times=times[first] / times[best])


def named(findings: Findings) -> None:
    """What would be timed; each is set up, over tensors without data."""
    for one in alternatives(TARGETS[90], torch.device("meta")):
        names = [launch.name for launch in launches_of(one, TARGETS[90])]
        findings.put("tile", of=one.of, way=one.way, launches=names)


def main(_part: str, lines: str, *more: str) -> int:
    """Time them, or in a dry run name them."""
    findings = Findings(Path(lines))
    if "--dry-run" in more:
        named(findings)
    else:
        tiles(findings, torch.device("cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
