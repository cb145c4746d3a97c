"""Building the C++ kernels: once for many processes, never half, and never in the way."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenfleet.kernels import backend as backend_module
from tokenfleet.kernels import build
from tokenfleet.kernels.backend import Backend, using
from tokenfleet.kernels.norm import rms_norm

ONE_OP = """
import torch
from tokenfleet.kernels.backend import backend
from tokenfleet.kernels.norm import rms_norm
rms_norm(torch.ones(1, 16), torch.ones(16), 1e-6)
print(backend.name)
"""


@pytest.fixture
def small_sources(tmp_path, monkeypatch):
    """A source folder with one file of one line, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "activation.cpp").write_text('extern "C" int nothing() { return 0; }\n')
    monkeypatch.setattr(build, "HERE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXXFLAGS", "-O0")
    return folder


def test_library_is_built_once_and_found_again(small_sources, caplog):
    with caplog.at_level(logging.INFO, "tokenfleet.kernels"):
        first = build.ensure_library()
        stamp = first.stat().st_mtime_ns
        assert build.ensure_library() == first
    assert first.stat().st_mtime_ns == stamp
    assert len([r for r in caplog.records if "compiled" in r.message]) == 1
    leftovers = {p.suffix for p in first.parent.iterdir()}
    assert leftovers == {".so", ".lock"}


def test_another_source_is_another_library(small_sources):
    first = build.ensure_library()
    with (small_sources / "activation.cpp").open("a") as file:
        file.write("// changed\n")
    assert build.ensure_library() != first
    assert first.exists()


def test_other_flags_are_another_library(small_sources, monkeypatch):
    first = build.ensure_library()
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert build.ensure_library() != first


def test_a_failed_build_says_what_the_compiler_said_and_leaves_nothing(small_sources):
    (small_sources / "activation.cpp").write_text("this is no C++;\n")
    with pytest.raises(build.BuildError, match="this"):
        build.ensure_library()
    assert [p.suffix for p in build.cache_folder().iterdir()] == [".lock"]


def test_without_a_compiler_auto_runs_the_reference_with_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    backend = Backend()
    assert backend.select("auto") == "reference"
    assert backend.library is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "/no/such/compiler" in caplog.text


def test_on_cuda_nothing_is_compiled_for_the_cpu_until_a_tensor_there_asks(monkeypatch):
    """A GPU's first start waits for no C++ compiler, and needs none."""
    loaded = []
    monkeypatch.setattr(backend_module, "triton_devices", lambda _choice: frozenset(("cuda",)))
    monkeypatch.setattr(backend_module, "load_library", lambda: loaded.append(1) or "the library")
    with backend_module.using("auto") as chosen:
        assert chosen == "triton"
        assert backend_module.compiled(torch.ones(1, device="meta")) is None
        assert loaded == []
        assert backend_module.compiled(torch.ones(1)) == "the library"
        assert backend_module.compiled(torch.ones(1)) == "the library"
        assert loaded == [1]


def test_without_a_compiler_cpp_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        Backend().select("cpp")


def test_an_unwritable_cache_is_a_build_error(small_sources, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(build.BuildError, match="cannot write"):
        build.ensure_library()


def test_unknown_choice_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("TOKENFLEET_KERNELS", "fast")
    with pytest.raises(ValueError, match="reference, cpp, triton, auto, got fast"):
        Backend().select()


def test_processes_that_start_together_build_once(small_sources):
    code = (
        "import logging, sys; from pathlib import Path; from tokenfleet.kernels import build;"
        "logging.basicConfig(level=logging.INFO);"
        f"build.HERE = Path({str(small_sources)!r}); print(build.ensure_library())"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert len({stdout for stdout, _ in outputs}) == 1
    assert sum("compiled" in stderr for _, stderr in outputs) == 1


@pytest.mark.parametrize("choice", ["reference", "cpp"])
def test_the_environment_chooses(choice):
    environment = {**os.environ, "TOKENFLEET_KERNELS": choice}
    done = subprocess.run(
        [sys.executable, "-c", ONE_OP], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == choice


def test_one_openmp_runtime_serves_torch_and_the_kernels():
    with using("cpp"):
        rms_norm(torch.ones(64, 1024), torch.ones(1024), 1e-6)
        torch.ones(1 << 20).exp().sum()
    mapped = Path("/proc/self/maps").read_text().split()
    names = ("libgomp", "libiomp", "libomp")
    runtimes = {path for path in mapped if Path(path).name.startswith(names)}
    assert runtimes == {str(build.find_openmp_runtime())}


def test_command_prints_the_path(capsys):
    assert build.main() == 0
    assert Path(capsys.readouterr().out.strip()).exists()


def test_command_without_a_compiler_says_so(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.main() == 1
    assert "reference runs instead" in capsys.readouterr().err
