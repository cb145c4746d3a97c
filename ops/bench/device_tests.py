"""Runs the tests that a GPU is for, in several processes at once: their time goes into compiling.

Every result is written as it comes, so what was tested is known whenever this is stopped, and a
failure is kept with its traceback. The file is also the pytest plugin that does both; it needs no
other one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTEST_INI = """[pytest]
addopts = --import-mode=importlib
markers =
    gpu: needs a CUDA device
    smollm2: needs a checkpoint
    long: takes its time
    timeout: of a test
    xdist_group: that share a process
"""
_LINES, _SHARE = "DEVICE_CHECK_LINES", "DEVICE_CHECK_SHARE"


def most_processes() -> int:
    """That compile at the same time: one a core, with some left for whoever started them."""
    return max(1, (os.cpu_count() or 1) - 2)


def main(_part: str, lines: str, *more: str) -> int:
    """All tests, each in one of the processes; in a dry run they are only collected."""
    ini = Path(lines).with_suffix(".ini")
    ini.write_text(PYTEST_INI)
    tests = ROOT / "tests"
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", Path(__file__).stem,
        "-c", str(ini), f"--rootdir={ROOT}", f"--confcutdir={tests / 'kernels'}", "-k", "not aot",
        str(tests / "engine" / "execution" / "test_on_gpu.py"), str(tests / "kernels" / "gpu"),
    ]  # fmt: skip
    dry = "--dry-run" in more
    count = 1 if dry else most_processes()
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    running = []
    for i in range(count):
        environment = os.environ | {
            "PYTHONPATH": path, _LINES: lines, _SHARE: f"{i}/{count}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }  # fmt: skip
        chosen = [*command, "--collect-only"] if dry else command
        running.append(subprocess.Popen(chosen, env=environment, cwd=ROOT))
    codes = [process.wait() for process in running]
    return int(any(codes))


# -- the plugin ----------------------------------------------------------------------------


def _write(**result: Any) -> None:
    with Path(os.environ[_LINES]).open("a") as file:  # a short line is appended as a whole
        file.write(json.dumps(result) + "\n")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep this process's share."""
    mine, count = map(int, os.environ[_SHARE].split("/"))
    items[:] = items[mine::count]
    _write(what="collected", count=len(items))


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(what="test", name=report.nodeid, outcome="error", log=str(report.longrepr)[-3000:])


def pytest_runtest_logreport(report: Any) -> None:
    """One line a test, and one more where its set-up or its end fails."""
    if report.when != "call" and report.passed:
        return
    outcome = report.outcome if report.when == "call" or report.skipped else "error"
    log = {} if not report.failed else {"log": str(report.longrepr)[-3000:]}
    seconds = round(report.duration, 2)
    _write(what="test", name=report.nodeid, outcome=outcome, seconds=seconds, **log)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
