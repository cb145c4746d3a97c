"""Records the C++ kernels that some work calls, so that it can be done again in one call.

A program does the same operations on the same addresses, whatever they hold by then: like a CUDA
graph, on the CPU. Between two small kernels Python takes as long as the kernels do.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from tokenfleet.kernels.backend import backend, recorded_by
from tokenfleet.kernels.workspace import Workspace

Arguments = bytes
_PACK = struct.Struct("@Pq").pack  # the argument struct of program.cpp


class NotRecordable(RuntimeError):
    """The work computes something that is not a call of the C++ kernels; it was not finished."""


class Program:
    """Recorded work. `result` is what the work returned; each run writes it again."""

    def __init__(
        self, library: ctypes.CDLL, calls: list[tuple[Any, Arguments]], result: Tensor, kept: Any
    ) -> None:
        self.result = result
        self._library = library
        self._calls, self._kept = calls, kept  # their addresses are in the table
        self._table = (ctypes.c_void_p * (2 * len(calls)))()
        for i, (function, arguments) in enumerate(calls):
            self._table[2 * i] = ctypes.cast(function, ctypes.c_void_p).value
            self._table[2 * i + 1] = ctypes.cast(ctypes.c_char_p(arguments), ctypes.c_void_p).value
        self._packed = _PACK(ctypes.addressof(self._table), len(calls))

    def __len__(self) -> int:
        """How many kernels it runs."""
        return len(self._calls)

    @property
    def current(self) -> bool:
        """Whether the process still runs the kernels that were recorded."""
        return backend.library is self._library

    def run(self) -> Tensor:
        """Do the work again. Other Python threads go on meanwhile."""
        self._library.tf_run(self._packed)
        return self.result


def record(work: Callable[[], Tensor], workspace: Workspace) -> Program:
    """Do the work once, and return what repeats it.

    Args:
        work: reads and writes tensors of the caller, which outlive the program; what it makes on
            the way may lie in the workspace.

    Raises:
        NotRecordable: it reads a value, or computes with torch.
    """
    if backend.name is None:
        backend.select()
    library = backend.library
    if library is None:
        raise NotRecordable("the C++ kernels do not run here")
    recorder, allocations = _Recorder(library), _OnlyViews()
    with recorded_by(recorder), allocations:
        result = work()
    kept = [*allocations.made, *workspace.memory]
    return Program(library, recorder.calls, result, kept)


class _Recorder:
    """Stands for the library: calls it and keeps the calls."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.calls: list[tuple[Any, Arguments]] = []

    def __getattr__(self, name: str) -> Callable[[Arguments], None]:
        function = getattr(self._library, name)

        def call(arguments: Arguments) -> None:
            function(arguments)
            self.calls.append((function, arguments))

        return call


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch make views and memory, which is kept, and nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for it, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket not in _ALLOCATIONS and not func.is_view:
            raise NotRecordable(f"{func} is computed by torch")
        result = func(*args, **(kwargs or {}))
        self.made += [leaf for leaf in tree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return result


_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided}
