"""The C library's heap, which keeps what was freed in case it is asked for again.

Invariant: nothing here changes what is allocated; where the C library cannot, nothing happens.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return freed pages to the system, those between pieces in use too (glibc's malloc_trim).

    It takes milliseconds: for the end of large pieces of work with memory of their own.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
