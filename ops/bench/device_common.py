"""What the parts of the device check share: time left, figures written as they come, clocks."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Findings:
    """Writes one JSON object a line, and knows how much time is left."""

    def __init__(self, lines: Path) -> None:
        self._lines = lines
        self._until = time.monotonic() + float(os.environ.get("DEVICE_CHECK_LIMIT_S", "60"))

    def put(self, what: str, **figures: Any) -> None:
        """Keep a figure, whatever happens afterwards."""
        with self._lines.open("a") as file:
            file.write(json.dumps({"what": what, **figures}) + "\n")

    @contextmanager
    def attempt(self, what: str, **figures: Any) -> Iterator[None]:
        """Go on behind the block whatever it raises: that becomes a figure that is not `ok`.

        A device that is lost stays so: what follows fails too, and soon.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001  # it is kept, and fails the part
            trace = "".join(traceback.format_exception(error))
            self.put(
                "failed", of=what, **figures, ok=False, error=repr(error)[:500], trace=trace[-3000:]
            )

    def time_for(self, seconds: float) -> bool:
        """Whether so much time is left."""
        return time.monotonic() + seconds < self._until


@contextmanager
def made_ready(device: torch.device) -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles, or loads, for the first time within the block."""
    names: list[str] = []
    if device.type != "cuda":
        yield names
        return
    from triton import knobs

    def note(*, fn: Any, **_rest: Any) -> None:
        names.append(str(fn.name))

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, least_s: float = 0.1) -> float:
    """Time of one call, from as many as take `least_s`, after one that warms up.

    On CUDA a buffer larger than the cache is written in between, so nothing is read from there.
    """
    work()
    synchronise(device)
    if device.type != "cuda":
        started, calls = time.perf_counter(), 0
        while time.perf_counter() - started < least_s:
            work()
            calls += 1
        return (time.perf_counter() - started) / calls
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
    pairs = []
    started = time.perf_counter()
    while time.perf_counter() - started < least_s or len(pairs) < 5:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
        if len(pairs) % 20 == 0:
            torch.cuda.synchronize(device)
    torch.cuda.synchronize(device)
    times = sorted(begin.elapsed_time(end) for begin, end in pairs)
    return times[len(times) // 2] / 1000


def copy_ceiling(device: torch.device, num_bytes: int) -> float:
    """Bytes a second, read and written, of a copy."""
    source = torch.empty(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)
