"""An error in a launch costs the chunk that caused it, never the batch.

The work is tried again in halves until it is alone. That is safe because a step only writes KV at
positions it owns, and writes the same again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenfleet.engine.execution.flight import Part, Timing
from tokenfleet.engine.scheduling.plan import Chunk

Attempt = Callable[[list[Chunk], Timing], Part]


class Containment:
    """Launches chunks by `attempt`, together if that can be."""

    def __init__(self, attempt: Attempt, device: torch.device) -> None:
        self._attempt = attempt
        self._device = device

    def launch(self, work: list[Chunk], timing: Timing, tries: int = 2) -> list[Part]:
        """Parts that cover the work in its order; what cannot be launched is in error.

        Raises:
            RuntimeError: the device is lost.
        """
        try:
            return [self._attempt(work, timing)]
        except Exception as raised:
            if is_fatal(raised):
                raise
            error = raised.with_traceback(None)  # its frames hold tensors
        return self._again(work, timing, error, tries)

    def _again(self, work: list[Chunk], timing: Timing, error: Exception, tries: int) -> list[Part]:
        if is_out_of_memory(error):
            timing.out_of_memory += 1
            free_cached_memory(self._device)
            if tries > 1:
                return self.launch(work, timing, tries - 1)
            if len(work) == 1 and work[0].count > 1:
                return self._in_two_chunks(work[0], timing)
        if len(work) == 1:
            return [Part(work, error=f"{type(error).__name__}: {error}")]
        middle = len(work) // 2
        head, tail = work[:middle], work[middle:]
        return self.launch(head, timing, 1) + self.launch(tail, timing, 1)

    def _in_two_chunks(self, chunk: Chunk, timing: Timing) -> list[Part]:
        """The same tokens in two passes of half the size; their outcomes are joined later."""
        half = chunk.count // 2
        head = Chunk(chunk.sequence, chunk.start, half, samples=False)
        tail = Chunk(chunk.sequence, chunk.start + half, chunk.count - half, chunk.samples)
        first = self.launch([head], timing, 1)
        if any(part.error for part in first):
            return first
        return first + self.launch([tail], timing, 1)


_NO_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",  # outside of torch's allocator: graphs, modules, pinned memory
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device or the host ran out of memory in an allocation."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(what in str(error) for what in _NO_MEMORY)


def is_fatal(error: Exception) -> bool:
    """A CUDA error other than out-of-memory leaves the context unusable: only a restart helps."""
    said = str(error)  # by torch, or by Triton's launcher, whichever comes to it first
    lost = isinstance(error, torch.AcceleratorError) or "CUDA error" in said
    lost |= "Triton Error [CUDA]" in said
    return lost and not is_out_of_memory(error)


def free_cached_memory(device: torch.device) -> None:
    """Give what torch's allocator keeps for later back to the card."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
