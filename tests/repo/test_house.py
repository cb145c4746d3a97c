"""The house: what stands at the top level, and that packages export what they say."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "deploy",
    "engine",
    "kernels",
    "ops",
    "producer",
    "pyproject.toml",
    "tests",
    "worker",
}
SAYS = re.compile(r'"""\S.{20,}')
DOCUMENTED = {
    "tokenfleet.producer": {
        *("AsyncClient", "Client", "SamplingParams", "Event", "JobResult", "JobStatus"),
        *("TokenfleetError", "InvalidJob", "QueueFull", "IdempotencyMismatch", "JobFailed"),
        *("JobCancelled", "JobExpired", "DeadlineExceeded", "StreamInterrupted"),
        *("BrokerUnavailable", "ResultTimeout"),
    },
    "tokenfleet.engine": {
        *("Engine", "EngineConfig", "SamplingParams", "EngineError", "ConfigError"),
        *("InvalidRequest", "UnsupportedModel", "CheckpointError", "InvariantBroken"),
    },
}


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    return listed.stdout.splitlines()


def test_only_what_is_allowed_stands_at_the_top_level() -> None:
    assert {path.split("/")[0] for path in tracked()} <= ALLOWED


@pytest.mark.parametrize("package", DOCUMENTED)
def test_a_package_exports_exactly_its_all_and_all_that_is_documented(package: str) -> None:
    module = importlib.import_module(package)
    exported = list(module.__all__)
    assert len(exported) == len(set(exported))
    assert all(hasattr(module, name) for name in exported)
    assert DOCUMENTED[package] <= set(exported)


def test_every_module_says_what_it_is_for() -> None:
    packages = ("producer", "worker", "engine", "kernels")
    files = [f for f in tracked() if f.endswith(".py") and f.split("/")[0] in packages]
    assert len(files) > 50
    texts = {file: (ROOT / file).read_text() for file in files}
    silent = [file for file, text in texts.items() if text.strip() and not SAYS.match(text)]
    assert silent == []


def test_every_metric_is_named_by_the_rule() -> None:
    from tokenfleet.producer import semconv

    named = [
        v for v in vars(semconv).values() if isinstance(v, str) and v.startswith("tokenfleet_")
    ]
    assert len(named) > 15
    assert all(re.fullmatch(r"tokenfleet(_[a-z]+)+", name) for name in named)


def test_the_changelog_speaks_of_the_version_that_is_built() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()
