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

import device_tiles
import torch
from device_common import Findings
from device_engine import SHAPES
from device_tests import most_processes

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.execution.buckets import decode_buckets, mixed_buckets
from tokenfleet.engine.execution.graphs import DeviceTables, StepGraphs
from tokenfleet.engine.execution.profiling import run_largest_step, run_other_steps
from tokenfleet.engine.model import one_row
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import Loader
from tokenfleet.engine.model.tensor_source import RandomTensors
from tokenfleet.kernels.gpu import registry
from tokenfleet.kernels.gpu.launch import EARLY, TARGETS, Gpu, Launch, gpu_of, recording
from tokenfleet.kernels.paged_attention import AttentionBatch

EARLY_PROCESSES = 2
"""Of all, those that compile the kernels that begin early: two for each model."""
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
    """One launch for each binary, those of the engines first."""
    seen = set()
    for launch in _all_launches(gpu):
        if launch.key() not in seen:
            seen.add(launch.key())
            yield launch


def _all_launches(gpu: Gpu) -> Iterator[Launch]:
    for shape, dtype, quantization, sizes in ENGINES:
        with recording(gpu) as found, torch.inference_mode():
            _steps(shape, dtype, quantization, **sizes)
        yield from found
    for examples in registry.launches(gpu, long=False).values():  # of the part `kernels`
        yield from examples
    for one in device_tiles.alternatives(gpu, META):
        yield from device_tiles.launches_of(one, gpu)


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
    decoder = Loader(Blank(dtype), spec, dtype, META, quantization, None).decoder()
    for most in sorted({1, seqs}):
        limits = EngineConfig(".", max_num_seqs=most, max_num_batched_tokens=budget)
        run_largest_step(decoder, limits, 16, max_len)
        run_other_steps(decoder, limits, 16, max_len)
        _captured(decoder, most, budget, max_len)
    one_row.Switch.on = False
    _captured(decoder, 1, 1, max_len)
    one_row.Switch.on = True
    for length in (128, max_len, 8192):
        _launched(decoder, min(length, budget), length)


def _captured(decoder: Decoder, seqs: int, budget: int, max_len: int) -> None:
    """All that an engine replays."""
    StepGraphs(
        decoder, decoder.make_pools(9, 16), decode_buckets(seqs) + mixed_buckets(budget, seqs),
        tables=DeviceTables(seqs, -(-max_len // 16), NoTransfers(), META),
        newest=torch.zeros(seqs + 1, dtype=torch.int64, device=META), unknown=None,
        max_len=max_len, transfers=NoTransfers(), capture=once,
    )  # fmt: skip


def _launched(decoder: Decoder, tokens: int, max_len: int) -> None:
    """A step of one chunk that no graph was captured for, and steps of one token each."""
    ids = torch.zeros(tokens, dtype=torch.int64, device=META)
    for count, decodes in ((tokens, 0), (1, 1), (32, 32)):
        sequences = max(1, decodes)
        rows = torch.zeros(sequences + 1, dtype=torch.int32, device=META)
        blocks = torch.zeros((sequences, -(-max_len // 16)), dtype=torch.int32, device=META)
        batch = AttentionBatch(
            query_starts=rows, kv_lens=rows[1:], block_tables=blocks, slots=ids[:count],
            positions=ids[:count], num_decodes=decodes,
            max_query_len=1 if decodes else count, max_kv_len=max_len,
        )  # fmt: skip
        decoder.logits(decoder.forward(ids[:count], batch, decoder.make_pools(9, 16))[:1])


def compile_share(findings: Findings, share: int, count: int) -> None:
    """Every `count`-th launch, from `share` on."""
    on_gpu = torch.cuda.is_available()
    gpu = gpu_of(torch.device("cuda")) if on_gpu else TARGETS[90]
    wanted = [launch for launch in launches(gpu) if launch.early or not EARLY]
    mine = wanted[share::count]
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
    findings.put("compiled", kernels=len(mine), early=EARLY, seconds=took, failed=failed)


def main(part: str, lines: str, *more: str) -> int:
    """Compile a share, or start as many processes as do all."""
    if more[:1] == ("--share",):
        compile_share(Findings(Path(lines)), int(more[1]), int(more[2]))
        return 0
    dry = "--dry-run" in more
    early = 0 if dry else EARLY_PROCESSES
    count = 1 if dry else max(1, most_processes() - early)
    command = [sys.executable, __file__, part, lines, "--share"]
    running = []
    for early_ones, shares in (("0", count), ("1", early)):
        environment = os.environ | {"TOKENFLEET_EARLY_LAUNCH": early_ones}
        for i in range(shares):
            share = [*command, str(i), str(shares)]
            running.append(subprocess.Popen(share, env=environment))
    return int(max(process.wait() != 0 for process in running))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
