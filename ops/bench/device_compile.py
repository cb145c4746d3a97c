"""Compiles the kernels that the other parts will launch, in several processes at once.

Triton compiles a kernel when it is first launched, one after the other; what this part compiled is
then found in Triton's cache. The launches are those of the engine itself, over tensors without data
and one layer of each shape. A kernel that does not compile is named, and met again where it is run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from device_common import Findings
from device_engine import SHAPES

from tokenfleet.engine.execution.buckets import decode_buckets, mixed_buckets
from tokenfleet.engine.execution.graphs import DeviceTables, StepGraphs
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import Loader
from tokenfleet.engine.model.tensor_source import RandomTensors
from tokenfleet.kernels.gpu.launch import TARGETS, Gpu, Launch, gpu_of, recording

MOST_PROCESSES = 8
META = torch.device("meta")
ENGINES: Sequence[tuple[str, torch.dtype, str | None, dict[str, int]]] = (
    ("0.6B", torch.bfloat16, None, {}),
    ("8B", torch.bfloat16, None, {}),
    ("small", torch.float32, None, {"seqs": 33, "budget": 64, "max_len": 128}),
    ("0.6B", torch.bfloat16, "fp8", {}),
    ("8B", torch.bfloat16, "fp8", {}),
)
"""As the parts will start them."""


class Blank(RandomTensors):
    """Tensors of the right shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return not name.endswith("_scale")

    def take(self, name: str, shape: Any, dtypes: Any = ()) -> torch.Tensor:
        return torch.empty(*shape, dtype=self._dtype, device=META)


class NoTransfers:
    """Sends nothing: nobody looks at what a step computes."""

    def send(self, array: Any) -> torch.Tensor:
        raise AssertionError("captured work sends nothing")

    def refill(self, tensor: torch.Tensor, array: Any) -> None:
        """Its shape is right already."""

    def fetch(self, tensors: Any) -> Any:
        raise AssertionError("captured work fetches nothing")


def once(work: Any) -> Any:
    """A capture that runs its work and keeps nothing."""
    work()
    return work


def launches(gpu: Gpu) -> Iterator[Launch]:
    """One launch for each binary."""
    seen = set()
    for shape, dtype, quantization, sizes in ENGINES:
        with recording(gpu) as found, torch.inference_mode():
            _steps(shape, dtype, quantization, **sizes)
        for launch in found:
            if launch.key() not in seen:
                seen.add(launch.key())
                yield launch


def _steps(
    shape: str,
    dtype: torch.dtype,
    quantization: str | None,
    seqs: int = 128,
    budget: int = 2048,
    max_len: int = 1024,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES[shape] | {"num_hidden_layers": 1}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        spec = read_spec(Path(folder), max_model_len=max_len)
    decoder = Loader(Blank(dtype), spec, dtype, META, quantization, False).decoder()
    StepGraphs(
        decoder, decoder.make_pools(9, 16), decode_buckets(seqs) + mixed_buckets(budget, seqs),
        tables=DeviceTables(seqs, -(-max_len // 16), NoTransfers(), META),
        newest=torch.zeros(seqs + 1, dtype=torch.int64, device=META), unknown=None,
        max_len=max_len, transfers=NoTransfers(), capture=once,
    )  # fmt: skip


def compile_share(findings: Findings, share: int, count: int) -> None:
    """Every `count`-th launch, from `share` on."""
    on_gpu = torch.cuda.is_available()
    gpu = gpu_of(torch.device("cuda")) if on_gpu else TARGETS[90]
    mine = list(launches(gpu))[share::count]
    started, failed = time.perf_counter(), []
    for launch in mine if on_gpu else ():
        if not findings.time_for(3):
            failed.append("no time was left")
            break
        try:
            launch.compile()
        except Exception as error:  # noqa: BLE001  # whoever launches it will say it again
            failed.append(f"{launch.name}: {error!r}"[:500])
    took = time.perf_counter() - started
    findings.put("compiled", kernels=len(mine), seconds=took, failed=failed)


def main(part: str, lines: str, *more: str) -> int:
    """Compile a share, or start as many processes as do all."""
    if more[:1] == ("--share",):
        compile_share(Findings(Path(lines)), int(more[1]), int(more[2]))
        return 0
    dry = "--dry-run" in more
    count = 1 if dry else max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    command = [sys.executable, __file__, part, lines, "--share"]
    running = [subprocess.Popen([*command, str(i), str(count)]) for i in range(count)]
    return int(max(process.wait() != 0 for process in running))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
