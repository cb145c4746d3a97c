"""Peers get environments of their own, and one that cannot be had is said and left out."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tokenfleet.worker.bench.peers import run
from tokenfleet.worker.bench.peers.environments import Environment, PeerUnavailable, our_modules
from tokenfleet.worker.bench.quality import BASE, SETTINGS, quality, texts
from tokenfleet.worker.bench.runs import BenchConfig, BenchFailed, Child, Program

pytestmark = pytest.mark.timeout(400)  # several processes that import torch, one after the other


def wheel(folder: Path, name: str) -> str:
    """A package that can be installed without a network; returns its path."""
    path = folder / f"{name}-1-py3-none-any.whl"
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "value = 1\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return str(path)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """The Python of an environment in which nothing is that a peer needs."""
    environment = Environment("empty", (wheel(wheels, "nothing"),))
    return environment.ensure(tmp_path_factory.mktemp("peers"), lambda _: None)


def can_import(python: Path, name: str) -> bool:
    done = subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False)
    return done.returncode == 0


def test_an_environment_is_made_once_and_again_for_other_packages(
    tmp_path: Path, wheels: Path
) -> None:
    said: list[str] = []
    one, other = wheel(wheels, "oneonly"), wheel(wheels, "otheronly")
    python = Environment("peer", (one, other), remove=("otheronly",)).ensure(tmp_path, said.append)
    assert can_import(python, "oneonly")
    assert not can_import(python, "otheronly")
    assert not can_import(python, "torch"), "ours must not be seen from there"
    Environment("peer", (one, other), remove=("otheronly",)).ensure(tmp_path, said.append)
    assert len(said) == 1
    Environment("peer", (other,)).ensure(tmp_path, said.append)
    assert len(said) == 2
    assert can_import(python, "otheronly")
    assert not can_import(python, "oneonly")


def test_a_package_that_cannot_be_had_is_said_with_its_name(tmp_path: Path) -> None:
    environment = Environment("peer", (str(tmp_path / "missing-1-py3-none-any.whl"),))
    with pytest.raises(PeerUnavailable, match=r"peer: .*missing"):
        environment.ensure(tmp_path, lambda _: None)
    with pytest.raises(PeerUnavailable):  # and a half-made environment is not taken for a whole one
        environment.ensure(tmp_path, lambda _: None)


@pytest.mark.parametrize(
    ("module", "engine", "missing"),
    [
        ("vllm_child", "vllm", "vllm"),
        ("vllm_server_child", "vllm-server", "aiohttp"),
        ("llama_child", "llama.cpp", "llama_cpp"),
    ],
)
def test_a_peers_child_needs_nothing_of_ours_but_its_modules(
    empty_python: Path, module: str, engine: str, missing: str
) -> None:
    """In an empty environment it fails for want of the peer, and of nothing before that."""
    with our_modules() as links, pytest.raises(BenchFailed, match=f"No module named '{missing}'"):
        Child(
            engine,
            {"model": "m", "dtype": "float32", "slots": 1},
            1,
            Program(
                f"tokenfleet.worker.bench.peers.{module}",
                str(empty_python),
                {"PYTHONPATH": str(links)},
            ),
        )


def test_a_peer_that_is_not_there_is_left_out_and_the_others_run(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = Environment("vllm", (str(tmp_path / "vllm-1-py3-none-any.whl"),))
    monkeypatch.setattr(run, "VLLM", nowhere)
    said: list[str] = []
    config = run.PeersConfig(
        BenchConfig(tiny_checkpoint, counts=(2,), repeats=1, threads=1),
        tmp_path,
        ours=("engine", "fleet"),
        peers=("vllm float16", "transformers"),
    )
    report = run.bench_peers(config, said.append, lambda _: None)
    assert {s.engine for s in report.summaries} == {
        "engine", "fleet", "transformers batch all",
    }  # fmt: skip
    assert "left_out" in report.facts["engines"]["vllm float16"]
    assert any(line.startswith("vllm float16 is left out") for line in said)
    pairs = {(found["of"], found["to"]) for found in report.ratios()}
    assert pairs == {(one, "transformers batch all") for one in ("engine", "fleet")}


def test_quality_is_none_lost_by_float32_and_some_by_the_others(tiny_checkpoint: Path) -> None:
    found = quality(tiny_checkpoint, threads=1, say=lambda _: None)
    assert set(found["settings"]) == set(SETTINGS)
    base = found["settings"][BASE]["all"]
    assert (base["nll_change"], base["top1_agreement"]) == (0.0, 1.0)
    for name in set(SETTINGS) - {BASE}:
        assert set(found["settings"][name]["texts"]) == set(texts())
        figures = found["settings"][name]["all"]
        assert figures["nll"] != base["nll"]
        assert abs(figures["nll_change"]) < 0.02
        assert 0.8 < figures["top1_agreement"] <= 1.0
