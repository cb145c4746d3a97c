"""Runs the parts of the device check one after the other, and merges what they found.

Every part is a process of its own with a time limit: one that hangs or dies costs its own figures
only, and leaves no process behind. A part writes each figure as it has it, a JSON object a line,
and the merged file is written every few seconds; so whenever this is stopped, what was measured is
there.

Started by ops/device_check.sh. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TELL_S = 5.0
"""Between two looks at a part that is running."""

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    limit_s: float
    """At most. Together they are more than there is: the last parts are those to go without."""


PARTS = (
    Part("machine", 60),
    Part("compile", 60),
    Part("engine-0.6B", 90),
    Part("engine-8B", 100),
    Part("equality", 80),
    Part("kernel-tests", 110),
    Part("engine-8B-early", 45),
    Part("engine-0.6B-early", 40),
    Part("kernels", 45),
    Part("tiles", 60),
    Part("transformers", 40),
    Part("engine-32B", 80),
    Part("sanitizer", 200),
)


def main(arguments: Sequence[str]) -> int:
    """Run the parts; 0 when none of the checks failed."""
    options = _parsed(arguments)
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = options.parts.split(",") if options.parts else [part.name for part in PARTS]
    started = time.monotonic()
    report: dict[str, Any] = {"dry_run": options.dry_run, "parts": {}}
    for part in (part for part in PARTS if part.name in names):

        def keep(result: dict[str, Any], name: str = part.name) -> None:
            report["parts"][name] = result
            report["seconds"] = round(time.monotonic() - started, 1)
            _write(options.out, report)

        left = options.limit_s - (time.monotonic() - started)
        why = _useless(report["parts"])
        skipped = {"status": "skipped", "why": why, "found": []}
        keep(skipped if why else _run(part, left, options, keep))
        _say(part.name, report["parts"][part.name])
    print(table(report))
    if why := _useless(report["parts"]):
        print(why)
    bad = [n for n, part in report["parts"].items() if part["status"] == "failed"]
    print(f"{options.out}: {'failed: ' + ', '.join(bad) if bad else 'no check failed'}")
    return 1 if bad else 0


def _useless(parts: dict[str, Any]) -> str | None:
    """Why no further part can find anything; None while it may."""
    machine = parts.get("machine", {"status": "ok", "found": []})
    if machine["status"] == "failed" and not machine["found"]:
        return "the part `machine` could not begin: its log says why"
    return next((one["why"] for one in machine["found"] if one["what"] == "no device"), None)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for files in between")
    parser.add_argument("--out", type=Path, default=Path("device_check.json"))
    parser.add_argument("--limit-s", type=float, default=460.0)
    parser.add_argument("--parts", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def _run(part: Part, left_s: float, options: argparse.Namespace, tell: Tell) -> dict[str, Any]:
    """One part's figures and how it ended: ok, failed, out of time or skipped.

    tell: gets what there is, every few seconds.
    """
    limit = left_s if options.dry_run else min(part.limit_s, left_s)
    if limit < 5:
        return {"status": "skipped", "why": "no time was left", "found": []}
    lines = options.work / f"{part.name}.jsonl"
    log = options.work / f"{part.name}.log"
    environment = os.environ | {
        "DEVICE_CHECK_LIMIT_S": f"{limit - 3:.1f}",
        "PYTHONUNBUFFERED": "1",
    }
    if not options.dry_run:  # nothing of the CPU's is compiled, and no kernel is another one unsaid
        environment["TOKENFLEET_KERNELS"] = "triton"
    if part.name.endswith("-early"):  # kernels begin while those before them end
        environment["TOKENFLEET_EARLY_LAUNCH"] = "1"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(part, lines, options), stdout=output, stderr=subprocess.STDOUT,
            env=environment, cwd=ROOT, process_group=0,
        )  # fmt: skip
        code = _waited(process, limit, lambda: tell({"status": "running", "found": _read(lines)}))
    found = _read(lines)
    if part.name == "kernel-tests":
        found = _tests_summary(found)
    status = "out of time" if code is None else "ok" if code == 0 else "failed"
    if any(one.get("ok") is False for one in found):
        status = "failed"
    result = {"status": status, "seconds": round(time.monotonic() - started, 1), "found": found}
    if status != "ok":
        result["log"] = log.read_text(errors="replace")[-8000:]
    return result


def _waited(
    process: subprocess.Popen[bytes], limit_s: float, tell: Callable[[], None]
) -> int | None:
    """Its exit status; None when it was ended, with all that it had started, for its time."""
    until = time.monotonic() + limit_s
    try:
        while (left := until - time.monotonic()) > 0:
            try:
                return process.wait(min(left, TELL_S))
            except subprocess.TimeoutExpired:
                tell()
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver is left behind
            process.wait(10)


def _command(part: Part, lines: Path, options: argparse.Namespace) -> list[str]:
    script = HERE / _SCRIPTS.get(part.name, "device_engine.py")
    tiny = ["--dry-run"] if options.dry_run else []
    return [sys.executable, str(script), part.name, str(lines), *tiny]


_SCRIPTS = {
    "machine": "device_kernels.py", "kernels": "device_kernels.py",
    "kernel-tests": "device_tests.py", "compile": "device_compile.py",
    "tiles": "device_tiles.py", "equality": "device_equality.py", "sanitizer": "device_equality.py",
}  # fmt: skip


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


def _tests_summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many tests ended how, then those that did not pass; also when they were cut off."""
    results = [one for one in lines if one["what"] == "test"]
    counts = Counter(one["outcome"] for one in results)
    sound = not (counts["failed"] or counts["error"])
    collected = sum(one["count"] for one in lines if one["what"] == "collected")
    whole = {"what": "kernel tests", "ok": sound, "collected": collected, **counts}
    return [whole, *(one for one in results if "log" in one)]


def _write(out: Path, report: dict[str, Any]) -> None:
    fresh = out.with_suffix(".partial")
    fresh.write_text(json.dumps(report, indent=1) + "\n")
    fresh.replace(out)


def _say(name: str, result: dict[str, Any]) -> None:
    print(f"{name:14} {result['status']:12} {result.get('seconds', 0):6.1f} s", flush=True)


def table(report: dict[str, Any]) -> str:
    """The runs of the engine, one a line."""
    rows = [f"{'model':8}{'weights':9}{'mode':22}{'n':>4}{'tok/s':>10}{'step ms':>9}{'of copy':>9}"]
    for part in report["parts"].values():
        for one in part["found"]:
            if one.get("what") == "W":
                share = one.get("share_of_copy")
                rows.append(
                    f"{one['model']:8}{one['weights']:9}{one['mode']:22}{one['concurrency']:4}"
                    f"{one['output_tokens_s']:10.1f}{one.get('step_ms', 0.0):9.2f}"
                    + (f"{share:9.2f}" if share is not None else "")
                )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
