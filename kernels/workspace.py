"""Where the operations of a forward pass put their results: memory that is used again and again.

A result lives until the layer after its own is done: two pieces of memory take turns, a layer each.
Whoever opens a workspace promises that nothing in it is needed longer. Without an open workspace a
result is a tensor of its own, as everywhere in torch.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: a cache line, an AVX-512 register
_MOST_VIEWS = 4096  # kept ready; a model's layers ask for the same few again


class Workspace:
    """Memory on the CPU for one forward pass at a time."""

    def __init__(self) -> None:
        self._pieces = [_Piece(), _Piece()]
        self._turn = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within the block `new_result` of this thread takes from this workspace."""
        before, _here.workspace = _here.workspace, self
        try:
            yield
        finally:
            _here.workspace = before

    def next_layer(self) -> None:
        """What the layer before the last one left may be overwritten now."""
        self._turn = 1 - self._turn
        self._pieces[self._turn].used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        return self._pieces[self._turn].empty(tuple(shape), dtype)

    @property
    def memory(self) -> list[Tensor]:
        """What holds the results so far; whoever keeps their addresses keeps it too."""
        return [piece.memory for piece in self._pieces]


class _Piece:
    """A stretch of memory that grows to what a layer needs."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.used = 0
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        place = self.used, shape, dtype
        view = self._views.get(place)
        if view is None:
            view = self._view(*place)
        self.used += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        return view

    def _view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self.memory):
            # tensors that lie in the old memory keep it; the new one starts where they ended
            self.memory = torch.empty(end + end // 4, dtype=torch.uint8)
            self._views.clear()
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        view = self._views[start, shape, dtype] = self.memory[start:end].view(dtype).view(shape)
        return view


class _Here(threading.local):
    workspace: Workspace | None = None


_here = _Here()


def new_result(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor on the CPU for what an operation computes."""
    workspace = _here.workspace
    if workspace is None:
        return torch.empty(shape, dtype=dtype)
    return workspace.empty(shape, dtype)
