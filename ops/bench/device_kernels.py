"""What the machine is, what it can do at most, and what each Triton kernel reaches of that."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from device_common import Findings, copy_ceiling, seconds_of

LEAST = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 17)}
"""Versions; what is older is a figure that fails, and everything is tried all the same."""


def machine(findings: Findings, device: torch.device) -> None:
    """Versions and hardware, then the fastest copy and the fastest product of each dtype."""
    with findings.attempt("about"):
        findings.put("about", **_about(device))
    for name, least in LEAST.items():
        with findings.attempt("version", name=name):
            _check_version(findings, name, least, needed=name != "triton" or device.type == "cuda")
    with findings.attempt("copy"):
        size = (2 << 30) if device.type == "cuda" else (8 << 20)
        findings.put("copy", gb_s=copy_ceiling(device, size) / 1e9)
    for dtype in (torch.bfloat16, *([torch.float8_e4m3fn] if device.type == "cuda" else [])):
        with findings.attempt("product", dtype=str(dtype)):
            product_ceiling(findings, device, dtype)
    if device.type == "cuda":
        from tokenfleet.kernels.gpu.linear import torch_has_product

        findings.put(
            "product of FP8 by rows", by="torch" if torch_has_product(device) else "triton"
        )


def _about(device: torch.device) -> dict[str, Any]:
    """Versions and hardware."""
    figures: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "cpus": os.cpu_count(),
        "compiler": shutil.which("cc") or shutil.which("gcc"),  # triton before 3.7 needs one
    }
    if device.type != "cuda":
        return figures
    found, (free, _) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
    return figures | {
        "cuda": torch.version.cuda,
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_gib": round(found.total_memory / (1 << 30), 1),
        "free_gib": round(free / (1 << 30), 1),
        "multiprocessors": found.multi_processor_count,
        "driver": _driver(),
    }


def _driver() -> str:
    """Version, clocks and limits as the driver tells them."""
    asked = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,mig.mode.current"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not told: {error!r}"[:200]


def _check_version(findings: Findings, name: str, least: tuple[int, int], *, needed: bool) -> None:
    if not needed:
        return
    found = importlib.import_module(name).__version__
    numbers = [int(part) for part in re.findall(r"\d+", found)[:2]]
    findings.put("version", name=name, found=found, ok=tuple(numbers) >= least)


def why_no_device() -> str:
    """What torch says of a CUDA device that it does not find."""
    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__} finds no CUDA device: {error}"[:1000]
    return f"torch {torch.__version__} finds no CUDA device and does not say why"


def product_ceiling(findings: Findings, device: torch.device, dtype: torch.dtype) -> None:
    """The fastest product of a dtype, with results in bfloat16."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in "ab")
    if dtype == torch.bfloat16:
        took = seconds_of(lambda: a @ b.t(), device)
    else:
        one = torch.ones((), device=device)
        wide = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        left, right = a.to(dtype), b.to(dtype).t()
        took = seconds_of(lambda: torch._scaled_mm(left, right, **wide), device)
    findings.put("product", dtype=str(dtype), tflop_s=2 * n**3 / took / 1e12)


def kernels(findings: Findings, device: torch.device) -> None:
    """Every example that ships: time, GB/s and TFLOP/s."""
    if device.type != "cuda":
        findings.put("kernel", name="none: Triton kernels are measured on CUDA only")
        return
    from tokenfleet.engine.execution.capture import CudaGraphCapture
    from tokenfleet.kernels.gpu.registry import OPERATIONS, examples

    for operation in OPERATIONS:
        for example in examples(device, [operation], long=False):
            if not findings.time_for(1.0):
                findings.put("stopped", before=example.name)
                return
            try:
                # replayed: launching some of them takes longer than they do
                work = CudaGraphCapture(device)(example.run)
                took = seconds_of(work, device, least_s=0.05)
            except Exception as error:  # noqa: BLE001 - one kernel must not hide the others
                findings.put("kernel", name=example.name, ok=False, error=repr(error)[:500])
                continue
            findings.put(
                "kernel",
                name=example.name,
                us=took * 1e6,
                gb_s=example.moved_bytes / took / 1e9,
                tflop_s=example.flops / took / 1e12,
            )


def main(part: str, lines: str, *more: str) -> int:
    """Run one part; 1 where there is nothing to run it on."""
    findings, dry = Findings(Path(lines)), "--dry-run" in more
    if not dry and not torch.cuda.is_available():
        findings.put("no device", ok=False, why=why_no_device())
        return 1
    run = {"machine": machine, "kernels": kernels}[part]
    run(findings, torch.device("cpu" if dry else "cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
