"""Compiles every Triton kernel that ships, for GPUs that are not there, and tells what came out.

    python -m tokenfleet.kernels.aot                     the common configurations, a table
    python -m tokenfleet.kernels.aot --long              all of them
    python -m tokenfleet.kernels.aot --brief             the common ones for one generation, one of
                                                         each kernel for the others
    python -m tokenfleet.kernels.aot --json --arch 90 --operation norm

Needs triton and no GPU: ptxas and cuobjdump come with the wheel. Binaries go to Triton's cache, so
a second run is quick. Exits with 1 when a kernel does not compile, uses local memory (a spill or an
indexed array), wants more shared memory than there is, or multiplies tiles of 64 rows and more
without the tensor cores' own instruction (wgmma on sm_90, tcgen05 on sm_100).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenfleet.kernels.gpu.launch import FUSED, INTERPRETED, TARGETS, Launch
from tokenfleet.kernels.gpu.registry import OPERATIONS, launches

SHARED_LIMIT = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one block may use. What is made for 8.0 also runs on cards of 8.6,
8.9 and 12, which have less than the 163 KiB of an A100."""
SHARED_OF_ALL = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Bytes of shared memory of a multiprocessor, of which each block takes another 1024."""
BRIEF_ARCH = 90
"""The generation for which a brief run compiles all that a common one does."""
HEADER = "arch  warps stages  regs local shared blocks"
TENSOR_CORE = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@dataclass(frozen=True, slots=True)
class Report:
    """One binary."""

    example: str
    kernel: str
    arch: int
    num_warps: int
    num_stages: int
    registers: int = 0
    local_bytes: int = 0
    """Stack of a thread: spills and arrays that could not be kept in registers."""
    shared_bytes: int = 0
    dots: tuple[str, ...] = ()
    """Tiles of each tl.dot: "64x128x64 bf16"."""
    instructions: tuple[str, ...] = ()
    """Kinds of tensor core instructions in the PTX."""
    error: str = ""

    @property
    def blocks(self) -> int:
        """How many blocks a multiprocessor holds at once: by registers, which a warp takes in
        pieces of 256, by shared memory, and by warps, 64 of them. 0 where that is not known."""
        if self.error or not self.registers:
            return 0
        of_warp = -(-self.registers * 32 // 256) * 256
        by_registers = 65536 // of_warp // self.num_warps
        by_shared = SHARED_OF_ALL[self.arch] // (self.shared_bytes + 1024)
        return min(32, 64 // self.num_warps, by_registers, by_shared)

    @property
    def faults(self) -> list[str]:
        """Why this binary must not ship; empty when it may."""
        if self.error:
            return [self.error]
        found = []
        if self.local_bytes:
            found.append(f"{self.local_bytes} bytes of local memory a thread")
        if self.shared_bytes > SHARED_LIMIT[self.arch]:
            found.append(f"{self.shared_bytes} bytes of shared memory")
        if self.needs_large_tiles and TENSOR_CORE[self.arch] not in self.instructions:
            found.append(f"no {TENSOR_CORE[self.arch]} for {', '.join(self.dots)}")
        return found

    @property
    def needs_large_tiles(self) -> bool:
        """A dot of 64 rows and more on a generation whose instruction works on such tiles."""
        tall = any(int(dot.split("x")[0]) >= 64 and "fp32" not in dot for dot in self.dots)
        return tall and self.arch >= 90


def reports(
    archs: Sequence[int],
    operations: Sequence[str] = OPERATIONS,
    *,
    long: bool = False,
    brief: bool = False,
) -> Iterator[Report]:
    """Compile what ships for these generations; launches that share a binary are compiled once.

    `brief` compiles one launch of each kernel for every generation but BRIEF_ARCH.
    """
    for arch in archs:
        seen = set()
        for operation in operations:
            for example, recorded in launches(TARGETS[arch], [operation], long=long).items():
                for launch in recorded:
                    one_of_each = brief and arch != BRIEF_ARCH
                    key = (operation, launch.name) if one_of_each else launch.key()
                    if key not in seen:
                        seen.add(key)
                        yield compile_one(example, launch, arch)


def compile_one(example: str, launch: Launch, arch: int) -> Report:
    """Compile one launch; a failure becomes the report's error."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    base = (example, launch.name, arch, launch.num_warps, launch.num_stages)
    attributes = {(i,): [["tt.divisibility", 16]] for i in launch.divisible}
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": FUSED,
    }
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # noqa: BLE001  # whatever the compiler raises is the finding
        return Report(*base, error=f"{type(error).__name__}: {error}"[:2000])
    registers, local = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Report(
        *base,
        registers=registers,
        local_bytes=local,
        shared_bytes=compiled.metadata.shared,
        dots=_dots(compiled.asm["ttir"]),
        instructions=tuple(name for name in TENSOR_CORE.values() if name in ptx),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resources: {text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _tool(name: str) -> str:
    from triton import knobs

    return str(getattr(knobs.nvidia, name).path)


def _dots(ttir: str) -> tuple[str, ...]:
    """M x N x K and type of the operands of every tl.dot."""
    pattern = r"tt\.dot .*: tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x\w+>"
    names = {"f32": "fp32", "f16": "fp16", "f8E4M3FN": "fp8"}
    found = [f"{m}x{n}x{k} {names.get(kind, kind)}" for m, k, kind, n in re.findall(pattern, ttir)]
    return tuple(dict.fromkeys(found))


def as_json(report: Report) -> dict[str, Any]:
    """Its fields, and what follows from them."""
    return {**asdict(report), "blocks": report.blocks, "faults": report.faults}


def as_line(report: Report) -> str:
    """A row below HEADER."""
    size = f"{report.registers:4d} {report.local_bytes:5d} {report.shared_bytes:7d} "
    size += f"{report.blocks:6d}"
    launch = f"sm_{report.arch:<4d}{report.num_warps:2d} {report.num_stages:2d}"
    fault = f"  FAULT: {'; '.join(report.faults)}" if report.faults else ""
    dots = f" {', '.join(report.dots)} -> {', '.join(report.instructions)}" if report.dots else ""
    return f"{launch} {size}  {report.example}: {report.kernel}{dots}{fault}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 where a kernel has a fault."""
    parser = argparse.ArgumentParser(prog="python -m tokenfleet.kernels.aot")
    parser.add_argument("--arch", type=int, action="append", choices=tuple(TARGETS))
    parser.add_argument("--operation", action="append", choices=OPERATIONS)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--long", action="store_true", help="every shipped configuration")
    size.add_argument("--brief", action="store_true", help=f"all for {BRIEF_ARCH} only")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    out, failed = sys.stdout, False
    if not options.json:
        out.write(HEADER + "\n")
    archs, operations = options.arch or tuple(TARGETS), options.operation or OPERATIONS
    for report in reports(archs, operations, long=options.long, brief=options.brief):
        failed |= bool(report.faults)
        line = json.dumps(as_json(report)) if options.json else as_line(report)
        out.write(line + "\n")
        out.flush()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
