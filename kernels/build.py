"""Compiles the C++ kernels with this machine's compiler, once, into a cache folder.

A library is never half there: it is written under another name and moved into place, under a
file lock, so that any number of processes may start at once. Its name holds a hash of the sources,
the compiler, the CPU and the OpenMP runtime: another machine or version builds its own.

    python -m tokenfleet.kernels.build      builds ahead and prints the library's path
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger("tokenfleet.kernels")

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fvisibility=hidden",
    "-Wall", "-Wextra", "-Wno-psabi",
    "-Wno-maybe-uninitialized", "-Wno-uninitialized",  # GCC 12's own AVX-512 headers set them off
)  # fmt: skip
COMPILE_TIMEOUT_S = 300.0


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why. The reference still runs."""


def ensure_library() -> Path:
    """The path of this machine's compiled library, compiling it first where it is missing."""
    compiler = find_compiler()
    runtime = find_openmp_runtime()
    target = cache_folder() / f"kernels-{_key(compiler, runtime)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _build(compiler, runtime, target)
    except OSError as error:
        raise BuildError(
            f"cannot write the compiled kernels to {target.parent}: {error}"
        ) from error
    return target


def find_compiler() -> Path:
    """$CXX, else g++, else clang++."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++"]:
        if found := shutil.which(name):
            return Path(found).resolve()
    raise BuildError(f"no C++ compiler: looked for {wanted or 'g++ and clang++'} on PATH")


def find_openmp_runtime() -> Path:
    """The OpenMP runtime that torch has loaded into this process.

    The kernels link against that very file: a second runtime would start a second thread pool,
    and the two would fight for the cores.
    """
    import torch  # noqa: F401  (loads it)

    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise BuildError(f"cannot see which OpenMP runtime torch uses: {error}") from error
    for line in mapped:
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(("libgomp", "libiomp5", "libomp")) and path.exists():
            return path
    raise BuildError("this build of torch has loaded no OpenMP runtime")


def flags() -> list[str]:
    """FLAGS, then what $CXXFLAGS adds (a later -march replaces an earlier one)."""
    return [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def cache_folder() -> Path:
    """Where built libraries are kept: below $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tokenfleet" / "kernels"


def sources() -> list[Path]:
    """The C++ files that make up the library."""
    return sorted(HERE.glob("*.cpp"))


def _key(compiler: Path, runtime: Path) -> str:
    digest = hashlib.sha256()
    for path in [*sources(), *sorted(HERE.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    stat = compiler.stat()
    digest.update(f"{flags()}|{compiler}|{stat.st_size}|{stat.st_mtime_ns}|{runtime}".encode())
    digest.update(_cpu().encode())
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What -march=native depends on."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        first = [line for line in _until_blank(lines) if line.startswith(wanted)]
        return platform.machine() + "".join(first)
    return platform.machine() + platform.processor()


def _until_blank(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            return
        yield line


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel drops it when this process dies
        yield


def _build(compiler: Path, runtime: Path, target: Path) -> None:
    started = time.monotonic()
    logger.info("compiling the C++ kernels for this CPU, once; this takes some ten seconds")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources()]
        compiling = [
            _start([compiler, *flags(), "-c", source, "-o", output])
            for source, output in zip(sources(), objects, strict=True)
        ]
        for process in compiling:
            _finish(process)
        library = Path(folder) / "kernels.so"
        _finish(_start([compiler, "-shared", "-o", library, *objects, runtime]))
        library.replace(target)
    logger.info("compiled the C++ kernels in %.1f s: %s", time.monotonic() - started, target)


def _start(command: Sequence[str | Path]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(process: "subprocess.Popen[str]") -> None:
    try:
        output, _ = process.communicate(timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BuildError(f"the compiler took longer than {COMPILE_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise BuildError(f"the compiler failed ({process.returncode}): {output[-2000:]}")


def main() -> int:
    """The command: builds what is not there, and prints its path; 1 where that fails."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        sys.stdout.write(f"{ensure_library()}\n")
    except BuildError as error:
        sys.stderr.write(
            f"the C++ kernels cannot be built here, the reference runs instead: {error}\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
