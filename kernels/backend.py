"""Which implementation of an operation runs: the torch reference, or a compiled one.

The choice is made once per process, on first use, and every operation asks here; so that all
operations of one forward pass come from the same choice. `TOKENFLEET_KERNELS` names it:

    reference   plain torch: the specification
    cpp         the C++ kernels on the CPU, compiled on first use; an error when that is impossible
    triton      the Triton kernels on CUDA, or on any device in Triton's interpreter; else an error
    auto        triton on CUDA, cpp on the CPU; reference where one cannot be had, said in one log
                line (default)
"""

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tokenfleet.kernels import build

logger = logging.getLogger("tokenfleet.kernels")

CHOICES = ("reference", "cpp", "triton", "auto")

# the codes of enum Dtype in vec.h
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
KV_DTYPE_CODES = {**DTYPE_CODES, torch.int8: 3}

# Each takes one pointer to its arguments, packed by `struct` into fields of 8 bytes: ctypes would
# spend longer on converting a dozen arguments than the smaller operations take.
FUNCTIONS = (
    "tf_rms_norm",
    "tf_sample",
    "tf_logsumexp",
    "tf_add_rms_norm",
    "tf_add_rms_norm_int8",
    "tf_silu_mul",
    "tf_gelu_tanh_mul",
    "tf_gated_bf16",
    "tf_gated_int8",
    "tf_gated_mlp_bf16",
    "tf_gated_mlp_int8",
    "tf_rope_kv",
    "tf_paged_attention",
    "tf_quantize_rows",
    "tf_linear_int8",
    "tf_linear_two_bytes",
    "tf_linear_bf16",
    "tf_run",
    "tf_greedy",
)


class Backend:
    """Holds the process's choice. `name` is None until the first operation asks."""

    __slots__ = ("deferred", "library", "name", "triton_devices")

    def __init__(self) -> None:
        self.name: str | None = None
        self.deferred = False  # the library is loaded when the first tensor on the CPU asks for it
        self.library: ctypes.CDLL | None = None  # for tensors on the CPU
        self.triton_devices: frozenset[str] = frozenset()  # device types that Triton kernels serve

    def select(self, choice: str | None = None) -> str:
        """Fix the choice (None: the environment's) and return what it resolved to.

        On a machine with both, `auto` is called "triton"; the C++ kernels are then compiled and
        loaded when a tensor on the CPU first asks for them, which one on CUDA never does.
        """
        wanted = choice or os.environ.get("TOKENFLEET_KERNELS") or "auto"
        if wanted not in CHOICES:
            raise ValueError(
                f"TOKENFLEET_KERNELS must be one of {', '.join(CHOICES)}, got {wanted}"
            )
        self.triton_devices = triton_devices(wanted)
        self.deferred = wanted == "auto" and "cuda" in self.triton_devices
        loads = wanted in ("cpp", "auto") and not self.deferred
        self.library = self._load(required=wanted == "cpp") if loads else None
        on_cpu = "reference" if self.library is None else "cpp"
        self.name = "triton" if self.triton_devices else on_cpu
        return self.name

    def load_deferred(self) -> None:
        """Load what `select` put off."""
        self.deferred = False
        self.library = self._load(required=False)

    def _load(self, *, required: bool) -> ctypes.CDLL | None:
        try:
            return load_library()
        except build.BuildError as error:
            if required:
                raise
            logger.warning("kernels run as plain torch, which is slower: %s", error)
            return None


def load_library() -> ctypes.CDLL:
    """The compiled kernels, ready to be called; raises BuildError."""
    path = build.ensure_library()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise build.BuildError(f"{path} cannot be loaded: {error}") from error
    for name in FUNCTIONS:
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_char_p], None
    library.tf_linear_features.restype = ctypes.c_int32
    return library


def triton_devices(choice: str) -> frozenset[str]:
    """Types of the devices whose tensors Triton kernels take under this choice.

    Raises:
        RuntimeError: `triton` is demanded and cannot be had.
    """
    has_cuda = torch.cuda.is_available()
    if choice not in ("triton", "auto") or (choice == "auto" and not has_cuda):
        return frozenset()
    try:
        import triton
    except ImportError as error:
        if choice == "triton":
            raise RuntimeError(f"TOKENFLEET_KERNELS=triton: {error}; pip install triton") from error
        logger.warning("on CUDA the operations run as plain torch, which is slower: %s", error)
        return frozenset()
    if triton.knobs.runtime.interpret:
        return frozenset(("cpu", "cuda"))
    if not has_cuda:
        raise RuntimeError(
            "TOKENFLEET_KERNELS=triton needs a CUDA device, or TRITON_INTERPRET=1 in the "
            "environment to run the kernels in Triton's interpreter"
        )
    return frozenset(("cuda",))


backend = Backend()


class _Here(threading.local):
    recorder: Any = None


_here = _Here()


def compiled(x: torch.Tensor) -> Any:
    """The compiled kernels when they are chosen and can take x (on the CPU, a known dtype); else
    None. In a thread that records, what stands for them.
    """
    if backend.name is None:
        backend.select()
    if not x.is_cpu or x.dtype not in DTYPE_CODES:
        return None
    if backend.deferred:
        backend.load_deferred()
    if backend.library is None:
        return None
    return backend.library if _here.recorder is None else _here.recorder


@contextmanager
def recorded_by(recorder: Any) -> Iterator[None]:
    """Within the block this thread's operations call their kernels through `recorder`."""
    before, _here.recorder = _here.recorder, recorder
    try:
        yield
    finally:
        _here.recorder = before


def uses_triton(x: torch.Tensor) -> bool:
    """Whether an operation on x runs as its Triton form, which lies in kernels/gpu."""
    if backend.name is None:
        backend.select()
    # asked by each operation of each layer: where the answer is no for all, x is not looked at
    return bool(backend.triton_devices) and x.device.type in backend.triton_devices


@contextmanager
def using(choice: str) -> Iterator[str]:
    """Run the body with another choice (tests and benchmarks; not for concurrent threads)."""
    before = backend.name, backend.library, backend.triton_devices, backend.deferred
    try:
        yield backend.select(choice)
    finally:
        backend.name, backend.library, backend.triton_devices, backend.deferred = before
