"""Every Triton kernel with the configurations that ship, as calls of the operations themselves.

An Example runs on any device: on "meta" inside `recording` it tells what would be compiled, on
"cuda" it runs and can be timed. What is not reached from here is not compiled ahead of time: a new
kernel adds its `examples` function, and the suite and the device script find it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tokenfleet.kernels.gpu.launch import Gpu, Launch, recording

OPERATIONS = (
    "token_pool",
    "token_mask",
    "paged_attention",
    "rope_kv",
    "block_copy",
    "norm",
    "activation",
    "fp8",
    "rng",
    "sampling",
    "step",
    "linear",
    "row",
    "row_attention",
    "moe",
)
"""Modules of this folder that have `examples(device) -> Iterator[Example]`."""


@dataclass(frozen=True, slots=True)
class Example:
    """One operation at one shape and dtype."""

    name: str
    """Operation, then what distinguishes this example: "silu_mul bf16 4096x12288"."""
    run: Callable[[], object]
    """Calls the operation; its tensors lie on the device that `examples` was given."""
    moved_bytes: int = 0
    """Bytes that must cross the memory bus at least: inputs once, outputs once."""
    flops: int = 0
    """Multiplications and additions of the definition."""
    common: bool = True
    """Compiled in every run of the suite; the others in the long form only."""


def examples(
    device: torch.device, operations: Sequence[str] = OPERATIONS, *, long: bool = True
) -> Iterator[Example]:
    """All examples of these operations; without `long` the common ones."""
    for operation in operations:
        module = importlib.import_module(f"tokenfleet.kernels.gpu.{operation}")
        for example in module.examples(device):
            if long or example.common:
                yield example


def launches(
    gpu: Gpu, operations: Sequence[str] = OPERATIONS, *, long: bool = True
) -> dict[str, list[Launch]]:
    """What each example launches on this GPU, by the example's name."""
    found: dict[str, list[Launch]] = {}
    for example in examples(torch.device("meta"), operations, long=long):
        with recording(gpu) as recorded:
            example.run()
        found[example.name] = recorded
    return found
