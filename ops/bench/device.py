"""Runs the parts of the device check one after the other, and merges what they found.

Every part is a process of its own with a time limit: one that hangs or dies costs its own figures
only. A part writes each figure as it has it, a JSON object a line, and the merged file is written
after each part; so whenever this is stopped, what was measured is there.

Started by ops/device_check.sh. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTEST_INI = """[pytest]
addopts = --import-mode=importlib
markers =
    gpu: needs a CUDA device
    smollm2: needs a checkpoint
    long: takes its time
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    limit_s: float
    """Of the eight minutes; what a part does not use goes to those behind it."""


PARTS = (
    Part("machine", 45),
    Part("equality", 70),
    Part("engine-0.6B", 70),
    Part("kernel-tests", 110),
    Part("engine-8B", 90),
    Part("kernels", 45),
    Part("transformers", 40),
    Part("engine-32B", 80),
)


def main(arguments: Sequence[str]) -> int:
    """Run the parts; 0 when none of the checks failed."""
    options = _parsed(arguments)
    names = options.parts.split(",") if options.parts else [part.name for part in PARTS]
    started = time.monotonic()
    report: dict[str, Any] = {"dry_run": options.dry_run, "parts": {}}
    for part in (part for part in PARTS if part.name in names):
        left = options.limit_s - (time.monotonic() - started)
        report["parts"][part.name] = _run(part, left, options)
        report["seconds"] = round(time.monotonic() - started, 1)
        _write(options.out, report)
        _say(part.name, report["parts"][part.name])
    print(table(report))
    bad = [n for n, part in report["parts"].items() if part["status"] == "failed"]
    print(f"{options.out}: {'failed: ' + ', '.join(bad) if bad else 'no check failed'}")
    return 1 if bad else 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for files in between")
    parser.add_argument("--out", type=Path, default=Path("device_check.json"))
    parser.add_argument("--limit-s", type=float, default=460.0)
    parser.add_argument("--parts", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def _run(part: Part, left_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """One part's figures and how it ended: ok, failed, out of time or skipped."""
    limit = left_s if options.dry_run else min(part.limit_s, left_s)
    if limit < 5:
        return {"status": "skipped", "why": "no time was left", "found": []}
    lines = options.work / f"{part.name}.jsonl"
    log = options.work / f"{part.name}.log"
    environment = os.environ | {
        "DEVICE_CHECK_LIMIT_S": f"{limit - 3:.1f}",
        "PYTHONUNBUFFERED": "1",
    }
    started = time.monotonic()
    with log.open("w") as output:
        command = _command(part, lines, options)
        try:
            code: int | None = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=limit, check=False,
                env=environment, cwd=ROOT,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    found = _read(lines)
    if part.name == "kernel-tests":
        found.append(_pytest_summary(log.read_text()))
    status = "out of time" if code is None else "ok" if code == 0 else "failed"
    if any(one.get("ok") is False for one in found):
        status = "failed"
    result = {"status": status, "seconds": round(time.monotonic() - started, 1), "found": found}
    if status != "ok":
        result["log"] = log.read_text()[-4000:]
    return result


def _command(part: Part, lines: Path, options: argparse.Namespace) -> list[str]:
    if part.name == "kernel-tests":
        ini = options.work / "pytest.ini"
        ini.write_text(PYTEST_INI)
        tests = ROOT / "tests"
        ours = [tests / "kernels" / "gpu", tests / "engine" / "execution" / "test_on_gpu.py"]
        shared = ["-p", "no:cacheprovider", "-c", str(ini), f"--rootdir={ROOT}"]
        shared += [f"--confcutdir={tests / 'kernels'}", *map(str, reversed(ours))]
        chosen = ["--collect-only"] if options.dry_run else ["-v", "-k", "not aot"]
        return [sys.executable, "-m", "pytest", *shared, *chosen]
    script = HERE / ("device_kernels.py" if part.name in _KERNEL_PARTS else "device_engine.py")
    tiny = ["--dry-run"] if options.dry_run else []
    return [sys.executable, str(script), part.name, str(lines), *tiny]


_KERNEL_PARTS = ("machine", "kernels")


def _read(lines: Path) -> list[dict[str, Any]]:
    """The objects that a part wrote; a last line that was cut off is left out."""
    if not lines.exists():
        return []
    found = []
    for line in lines.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _pytest_summary(log: str) -> dict[str, Any]:
    words = re.findall(r"::\S+.* (PASSED|FAILED|SKIPPED|ERROR)", log)  # also when it was cut off
    counts = {word.lower(): words.count(word) for word in sorted(set(words))}
    collected = re.search(r"(\d+) tests? collected", log)
    if collected:
        counts["collected"] = int(collected[1])
    sound = not (counts.get("failed") or counts.get("error"))
    return {"what": "kernel tests", "ok": sound, **counts}


def _write(out: Path, report: dict[str, Any]) -> None:
    fresh = out.with_suffix(".partial")
    fresh.write_text(json.dumps(report, indent=1) + "\n")
    fresh.replace(out)


def _say(name: str, result: dict[str, Any]) -> None:
    print(f"{name:14} {result['status']:12} {result.get('seconds', 0):6.1f} s", flush=True)


def table(report: dict[str, Any]) -> str:
    """The runs of the engine, one a line."""
    rows = [f"{'model':8}{'weights':9}{'mode':16}{'n':>4}{'tok/s':>10}{'step ms':>9}{'of copy':>9}"]
    for part in report["parts"].values():
        for one in part["found"]:
            if one.get("what") == "W":
                share = one.get("share_of_copy")
                rows.append(
                    f"{one['model']:8}{one['weights']:9}{one['mode']:16}{one['concurrency']:4}"
                    f"{one['output_tokens_s']:10.1f}{one.get('step_ms', 0.0):9.2f}"
                    + (f"{share:9.2f}" if share is not None else "")
                )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
