"""Every shipped kernel compiles for GPUs that are not here, and into what it should.

The compiling runs once a session, in a process of its own: this one has the interpreter.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tokenfleet.kernels.aot import HEADER, Report, as_line
from tokenfleet.kernels.gpu.registry import OPERATIONS, examples

pytestmark = [
    pytest.mark.timeout(3000),  # the first of them waits for the compiler
]
LONG = os.environ.get("TOKENFLEET_AOT") == "long"
GENERATIONS = (80, 90, 100)


def compiled(share: list[str]) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    size = "--long" if LONG else "--brief"
    command = [sys.executable, "-m", "tokenfleet.kernels.aot", "--json", size, *share]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def reports() -> list[Report]:
    shares = [[f"--arch={arch}"] for arch in GENERATIONS] if LONG else [[]]
    with ThreadPoolExecutor() as pool:
        found = [one for lines in pool.map(compiled, shares) for one in lines]
    made = [
        Report(**{k: v for k, v in one.items() if k not in ("faults", "blocks")}) for one in found
    ]
    if LONG:
        print("", HEADER, *map(as_line, made), sep="\n")
    return made


@pytest.fixture(scope="session")
def of_operation(reports):
    """Reports of one operation, by the examples that its module gives."""

    def select(operation: str) -> list[Report]:
        names = {example.name for example in examples(torch.device("meta"), [operation])}
        return [report for report in reports if report.example in names]

    return select


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_shipped_kernel_compiles_for_each_generation(of_operation, operation):
    found = of_operation(operation)
    assert [(r.kernel, r.arch, r.error) for r in found if r.error] == []
    assert {report.arch for report in found} == {*GENERATIONS}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_kernel_uses_local_memory_or_too_much_shared_memory(of_operation, operation):
    found = [report for report in of_operation(operation) if not report.error]
    assert [(r.example, r.kernel, r.arch, r.faults) for r in found if r.faults] == []
    assert all(report.registers > 0 for report in found)


def test_enough_weights_are_on_their_way_for_the_whole_bandwidth(reports):
    """Little's law: between a multiprocessor of an H200 and its memory there is room for 25 KB
    (4.8 TB/s for some 0.7 us, over 132). Of a block three tiles of 1 KB a row are on their way."""
    found = [r for r in reports if r.kernel == "_row" and r.arch == 90]
    assert found
    for report in found:
        rows = 8 if report.shared_bytes > 16384 else 4  # four where there are few outputs
        assert report.blocks * 3 * rows * 1024 >= 4.8e12 * 0.7e-6 / 132, report


def test_tall_tiles_are_multiplied_by_the_tensor_cores_own_instruction(reports):
    tall = [report for report in reports if report.needs_large_tiles and report.arch == 90]
    without = [r for r in tall if "wgmma.mma_async" not in r.instructions]
    assert [(report.example, report.kernel) for report in without] == []
    assert {report.kernel for report in tall} >= {"_attention"}
