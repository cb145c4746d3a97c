"""On random weights: eager steps give the tokens of plain torch, graphs and overlap those of eager
steps, and memory comes back.

Each batch size is a figure of its own, so one that fails hides no other. The part `sanitizer` runs
some eager steps where every access to memory is checked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from device_common import Findings, synchronise
from device_engine import MODES, Bench, play

from tokenfleet.engine.core import EngineCore
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.kernels import backend

Expected = dict[int, dict[str, list[int]]]
"""Tokens by request, by the number of requests."""


def equality(findings: Findings, folder: Path, device: torch.device, tiny: bool) -> None:
    """Graphs and overlap give the tokens of eager steps, in fp32, around each bucket; no leak."""
    counts = (1, 5) if tiny else (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33)
    bench = Bench(
        "tiny" if tiny else "small", folder, device, dtype="float32", max_num_seqs=counts[-1],
        max_num_batched_tokens=64, max_model_len=128, num_blocks=600, prefix_cache=False, seed=1,
    )  # fmt: skip
    expected: Expected = {}
    with findings.attempt("equality", mode="eager"):
        eager = bench.core(**MODES["eager"])
        expected |= {count: play(eager, _mixed(count)) for count in counts}
        del eager
        _against_torch(findings, bench, expected[counts[-1]])
    if not expected:
        return
    with findings.attempt("equality", mode="graphs"):
        _compare(findings, bench.core(**MODES["graphs"]), "graphs", expected, device)
    with findings.attempt("equality", mode="graphs+overlap"):
        core = bench.core(**MODES["graphs+overlap"])
        _compare(findings, core, "graphs+overlap", expected, device)
        del bench  # the weights have one owner now
        _sleep(core, findings, device, expected[counts[-1]], counts[-1])


def _against_torch(findings: Findings, bench: Bench, expected: dict[str, list[int]]) -> None:
    """The tokens of kernels with those of the operations' specification, on the same device.

    Sums are made in another order: a job may differ from a near tie on, a tenth of them may not.
    """
    with backend.using("reference"):
        found = play(bench.core(**MODES["eager"]), _mixed(len(expected)))
    differing = [key for key, ids in expected.items() if found[key] != ids]
    few = 10 * len(differing) <= len(expected)
    findings.put("equality", mode="eager against plain torch", differing=differing, ok=few)


def _compare(
    findings: Findings, core: EngineCore, mode: str, expected: Expected, device: torch.device
) -> None:
    """An engine's tokens with those of eager steps, batch by batch; then what it holds."""
    for count, tokens in expected.items():
        with findings.attempt("equality", mode=mode, batch=count):
            found = play(core, _mixed(count))
            core.audit()
            differing = [key for key, ids in tokens.items() if found[key] != ids]
            findings.put("equality", mode=mode, batch=count, differing=differing, ok=not differing)
    held = []
    for _ in range(3):
        play(core, _mixed(max(expected)))
        synchronise(device)
        held.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
    clean = held[1] == held[2] and core.scheduler.pool.num_used == 0
    findings.put("leak", mode=mode, allocated_bytes=held, ok=clean)


def _mixed(count: int) -> list[EngineRequest]:
    """Greedy, drawn and penalised jobs of several lengths."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ]
    requests = []
    for i in range(count):
        params = SamplingParams(max_tokens=16, seed=i, ignore_eos=True, **kinds[i % 3])
        prompt = [(13 * i + 7 * j) % 300 for j in range(3 + 5 * (i % 9))]
        requests.append(EngineRequest(str(i), prompt, params))
    return requests


def _sleep(
    core: EngineCore, findings: Findings, device: torch.device, expected: Any, count: int
) -> None:
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    core.sleep()
    asleep = torch.cuda.memory_allocated(device) if on_gpu else 0
    core.wake()
    equal = play(core, _mixed(count)) == expected
    findings.put("sleep", bytes_before=before, bytes_asleep=asleep, ok=equal)


def sanitizer(findings: Findings, lines: str, tiny: bool) -> None:
    """`sanitized` under compute-sanitizer; in a dry run without it."""
    command = [sys.executable, __file__, "sanitized", lines]
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if tiny:
        command.append("--dry-run")
    elif tool is not None:
        command = [tool, "--tool", "memcheck", "--error-exitcode", "9", *command]
    else:
        findings.put("sanitizer", why="compute-sanitizer is not installed")
        return
    # memory of its own for each tensor: else what lies behind one is another one's
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr)[-3000:]
    findings.put("sanitizer", ok=done.returncode == 0, code=done.returncode, said=said)


def sanitized(findings: Findings, folder: Path, device: torch.device, tiny: bool) -> None:
    """Eager steps of one sequence and of some, over weights in 16 bits and in FP8."""
    for quantization in (None, "fp8"):
        bench = Bench(
            "tiny" if tiny else "small", folder, device, quantization=quantization,
            dtype="float32" if tiny else "auto", max_num_seqs=5, max_num_batched_tokens=64,
            max_model_len=128, num_blocks=60, prefix_cache=False, seed=1,
        )  # fmt: skip
        core = bench.core(**MODES["eager"])
        for count in (1, 5):
            play(core, _mixed(count))
            findings.put("sanitized", quantization=quantization, batch=count)


def main(part: str, lines: str, *more: str) -> None:
    """Compare, on the GPU where there is one; or look for accesses beyond what is allocated."""
    tiny = "--dry-run" in more
    device = torch.device("cpu" if tiny or not torch.cuda.is_available() else "cuda")
    findings = Findings(Path(lines))
    if part == "sanitizer":
        sanitizer(findings, lines, tiny)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = sanitized if part == "sanitized" else equality
        run(findings, Path(folder), device, tiny)


if __name__ == "__main__":
    main(*sys.argv[1:])
