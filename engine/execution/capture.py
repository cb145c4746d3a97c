"""Turns work over fixed tensors into something that can be repeated without Python.

What is captured reads and writes tensors that exist before and after it, and never looks at a value
on the host: a repetition does the same operations on the same addresses, whatever they hold by
then. CudaGraphCapture makes CUDA graphs. RecordedCapture keeps the same contract anywhere, by
repeating recorded operations: the tests of everything around the graphs need no GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tokenfleet.engine.errors import ConfigError
from tokenfleet.engine.execution.containment import is_out_of_memory

Work = Callable[[], None]


class Capture(Protocol):
    """Makes a replay of some work."""

    def __call__(self, work: Work) -> Work:
        """Run the work, and return what repeats it."""
        ...


class CudaGraphCapture:
    """CUDA graphs that share one memory pool: capture the largest first.

    What a graph makes and does not write to a tensor of the caller's is lost with the next replay
    of any of them. Other threads may use CUDA meanwhile: a trainer in the same process, whose data
    loader pins memory, spoils no capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """The first run, outside of the graph, compiles kernels and sets up libraries.

        Raises:
            ConfigError: the work can be run and not captured.
        """
        if not self._graphs:  # a pool ends with its last graph: after a sleep it is another one
            self._pool = torch.cuda.graph_pool_handle()
        main = torch.cuda.current_stream(self._cuda_stream.device)
        self._cuda_stream.wait_stream(main)
        with torch.cuda.stream(self._cuda_stream):
            work()
        main.wait_stream(self._cuda_stream)
        graph = torch.cuda.CUDAGraph()
        self._record(graph, work, main)
        self._graphs.add(graph)
        return graph.replay

    def _record(self, graph: torch.cuda.CUDAGraph, work: Work, main: torch.cuda.Stream) -> None:
        pool, stream = self._pool, self._cuda_stream
        try:
            with (
                torch.cuda.stream(main),  # restored also where torch's own block cannot be left
                _nothing_collected(),
                torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
            ):
                work()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"a step could not be captured as a CUDA graph ({error}); set enforce_eager to run"
                " without graphs, which is slower for few sequences"
            ) from error


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Within the block no cycles are collected: an old graph or event that dies in a capture calls
    what a capture does not allow."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class HostRead(RuntimeError):
    """Captured work looked at a value on the host; a replay would go on with the old one."""


class RecordedCapture:
    """Repeats the operations of the first run on the tensors of the first run.

    Only operations that go through torch's dispatcher are seen, which those of the compiled and the
    Triton kernels do not: use it with the reference kernels.
    """

    def __call__(self, work: Work) -> Work:
        """Raises HostRead where the work looks at a value on the host."""
        recorder = _Recorder()
        with recorder:
            work()
        return recorder.replay


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in _READS or _has_mask_index(func, args):
            raise HostRead(f"{func} looks at a value on the host")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with _disable_current_modes():
            for func, args, kwargs, first in self._calls:
                for old, new in zip(_tensors(first), _tensors(func(*args, **kwargs)), strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.bincount}


def _has_mask_index(func: Any, args: tuple[Any, ...]) -> bool:
    """A bool index counts its true values first."""
    if func.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_):
        return False
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])


def _tensors(result: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree.tree_leaves(result) if isinstance(leaf, Tensor))
