"""The dtype that `auto` means on this CPU, measured once and remembered.

All engines on a machine must agree: a job that goes on in another worker continues the first one's
text only if both compute alike, and two measurements on a busy machine need not end alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from tokenfleet.kernels.backend import backend
from tokenfleet.kernels.build import cache_folder
from tokenfleet.kernels.dtype_choice import choose_dtype

# part of what is remembered: raised where kernels or the rule have changed enough to ask again
_MEASUREMENT = 2

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def fastest_dtype(candidates: Sequence[torch.dtype]) -> torch.dtype:
    """The fastest of `candidates`, which stand in order of preference; see choose_dtype."""
    file = cache_folder() / "dtype.json"
    key = _key(candidates)
    known = _read(file)
    if known.get(key) in _NAMES:
        return _NAMES[known[key]]
    chosen = choose_dtype(candidates)
    _write(file, known | {key: str(chosen).removeprefix("torch.")})
    return chosen


def _key(candidates: Sequence[torch.dtype]) -> str:
    names = "/".join(str(dtype) for dtype in candidates)
    kernels = f"{backend.name or backend.select()} {_MEASUREMENT}"
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} threads, torch {torch.__version__}, {kernels}, {names}"


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown CPU"


def _read(file: Path) -> dict[str, str]:
    """What is remembered; nothing when the file is not there or not ours."""
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text())
        if isinstance(content, dict):
            return content
    return {}


def _write(file: Path, content: dict[str, str]) -> None:
    """Replace the file as a whole; a folder that cannot be written only means measuring again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(content, indent=1))
        fresh.replace(file)
