"""What the machine is, what it can do at most, and what each Triton kernel reaches of that."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch
from device_common import Findings, copy_ceiling, seconds_of


def machine(findings: Findings, device: torch.device) -> None:
    """Versions and hardware, then the fastest copy and the fastest product of each dtype."""
    about(findings, device)
    with findings.attempt("copy"):
        size = (2 << 30) if device.type == "cuda" else (8 << 20)
        findings.put("copy", gb_s=copy_ceiling(device, size) / 1e9)
    for dtype in (torch.bfloat16, *([torch.float8_e4m3fn] if device.type == "cuda" else [])):
        with findings.attempt("product", dtype=str(dtype)):
            product_ceiling(findings, device, dtype)


def about(findings: Findings, device: torch.device) -> None:
    """Versions and hardware."""
    import transformers

    figures = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        import triton

        found = torch.cuda.get_device_properties(device)
        figures |= {
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "gpu": found.name,
            "memory_gib": round(found.total_memory / (1 << 30), 1),
            "multiprocessors": found.multi_processor_count,
        }
    findings.put("about", **figures)


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


if __name__ == "__main__":
    part, lines, *more = sys.argv[1:]
    on_cpu = "--dry-run" in more or not torch.cuda.is_available()
    run = {"machine": machine, "kernels": kernels}[part]
    run(Findings(Path(lines)), torch.device("cpu" if on_cpu else "cuda"))
