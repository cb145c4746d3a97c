"""Which implementation of an operation runs: the torch reference, or the compiled one.

The choice is made once per process, on first use, and every operation asks here; so that all
operations of one forward pass come from the same choice. `TOKENFLEET_KERNELS` names it:

    reference   plain torch: the specification
    cpp         the C++ kernels, compiled on first use; an error when that is impossible
    auto        cpp where it can be built, otherwise reference, said in one log line (default)
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenfleet.kernels import build

logger = logging.getLogger("tokenfleet.kernels")

CHOICES = ("reference", "cpp", "auto")

# the codes of enum Dtype in vec.h
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Each takes one pointer to its arguments, packed by `struct` into fields of 8 bytes: ctypes would
# spend longer on converting a dozen arguments than the smaller operations take.
FUNCTIONS = (
    "tf_rms_norm",
    "tf_sample",
    "tf_add_rms_norm",
    "tf_silu_mul",
    "tf_gelu_tanh_mul",
    "tf_rope_kv",
    "tf_paged_attention",
    "tf_quantize_rows",
    "tf_linear_int8",
    "tf_linear_bf16",
)


class Backend:
    """Holds the process's choice. `name` is None until the first operation asks."""

    __slots__ = ("library", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.library: ctypes.CDLL | None = None  # set exactly when name is "cpp"

    def select(self, choice: str | None = None) -> str:
        """Fix the choice (None: the environment's) and return what it resolved to."""
        wanted = choice or os.environ.get("TOKENFLEET_KERNELS") or "auto"
        if wanted not in CHOICES:
            raise ValueError(
                f"TOKENFLEET_KERNELS must be one of {', '.join(CHOICES)}, got {wanted}"
            )
        self.library = None if wanted == "reference" else self._load(required=wanted == "cpp")
        self.name = "reference" if self.library is None else "cpp"
        return self.name

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


backend = Backend()


def compiled(x: torch.Tensor) -> ctypes.CDLL | None:
    """The compiled kernels when they are chosen and can take x (on the CPU, a known dtype)."""
    if backend.name is None:
        backend.select()
    return backend.library if x.is_cpu and x.dtype in DTYPE_CODES else None


@contextmanager
def using(choice: str) -> Iterator[str]:
    """Run the body with another choice (tests and benchmarks; not for concurrent threads)."""
    before = backend.name, backend.library
    try:
        yield backend.select(choice)
    finally:
        backend.name, backend.library = before
