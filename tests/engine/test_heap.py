"""What was freed between pieces in use goes back to the system."""

import os
from pathlib import Path

from tokenfleet.engine.heap import give_back

PIECE, PIECES = 64 * 1024, 1000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pages_freed_between_pieces_in_use_are_given_back():
    pieces = [bytearray(os.urandom(16)) * (PIECE // 16) for _ in range(PIECES)]
    kept = pieces[::20]
    del pieces
    before = resident_bytes()
    give_back()
    assert resident_bytes() < before - PIECE * PIECES // 2
    assert len(kept) == PIECES // 20
