"""Records the C++ kernels that some work calls, so that it can be done again in one call.

A program does the same operations on the same addresses, whatever they hold by then: like a CUDA
graph, on the CPU. Between two small kernels Python takes as long as the kernels do.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from tokenfleet.kernels.arguments import fields_of
from tokenfleet.kernels.backend import backend, recorded_by
from tokenfleet.kernels.workspace import Workspace

Arguments = bytes
_PACK = struct.Struct("@Pq").pack  # the argument struct of program.cpp

_ROWS_IN = {
    "tf_rms_norm": "outer",
    "tf_add_rms_norm": "rows",
    "tf_add_rms_norm_int8": "rows",
    "tf_silu_mul": "rows",
    "tf_gelu_tanh_mul": "rows",
    "tf_linear_bf16": "rows",
    "tf_linear_int8": "rows",
    "tf_gated_bf16": "linear.rows",
    "tf_gated_int8": "linear.rows",
    "tf_gated_mlp_bf16": "gate_up.rows",
    "tf_gated_mlp_int8": "gate_up.rows",
    "tf_rope_kv": "tokens",
}
"""Which of a kernel's arguments is the number of rows or a multiple of it."""
_SEQUENCES_IN = {"tf_rope_kv": "batch.sequences", "tf_paged_attention": "batch.sequences"}
"""Which one is the number of sequences."""


class NotRecordable(RuntimeError):
    """The work computes something that is not a call of the C++ kernels; it was not finished."""


class Program:
    """Recorded work. `result` is what the work returned; each run writes it again."""

    def __init__(
        self, library: ctypes.CDLL, calls: list[tuple[Any, Arguments]], result: Tensor, kept: Any
    ) -> None:
        self.result = result
        self._library = library
        self.calls, self._kept = calls, kept  # their addresses are in the table
        self._table = (ctypes.c_void_p * (2 * len(calls)))()
        for i, (function, arguments) in enumerate(calls):
            self._table[2 * i] = ctypes.cast(function, ctypes.c_void_p).value
            self.point(i, ctypes.cast(ctypes.c_char_p(arguments), ctypes.c_void_p).value or 0)
        self._packed = _PACK(ctypes.addressof(self._table), len(calls))

    def __len__(self) -> int:
        """How many kernels it runs."""
        return len(self.calls)

    @property
    def current(self) -> bool:
        """Whether the process still runs the kernels that were recorded."""
        return backend.library is self._library

    def point(self, call: int, arguments: int) -> None:
        """Let a call take its arguments from this address."""
        self._table[2 * call + 1] = arguments

    def run(self) -> Tensor:
        """Do the work again. Other Python threads go on meanwhile."""
        self._library.tf_run(self._packed)
        return self.result


class RowsProgram:
    """Recorded work over the first rows and sequences of its tensors, as many as a run says.

    `result` is what the work returned; of it a run writes as many rows.
    """

    def __init__(self, program: Program, most_rows: int) -> None:
        self.most_rows = most_rows
        self._program, self._whole = program, program.result
        self._arguments = np.frombuffer(b"".join(a for _, a in program.calls), np.int64).copy()
        rows: list[tuple[int, int]] = []
        sequences, at = [], 0
        for i, (function, arguments) in enumerate(program.calls):
            name = function.__name__
            if name not in _ROWS_IN and name not in _SEQUENCES_IN:
                raise NotRecordable(f"where {name} has its number of rows is not known")
            fields = fields_of(name)
            assert len(arguments) == 8 * len(fields), name
            if name in _ROWS_IN:
                place = at + fields.index(_ROWS_IN[name])
                rows.append((place, int(self._arguments[place]) // most_rows))
            if name in _SEQUENCES_IN:
                sequences.append(at + fields.index(_SEQUENCES_IN[name]))
            program.point(i, self._arguments.ctypes.data + 8 * at)
            at += len(fields)
        self._rows_at, self._a_row = np.array(rows, np.int64).reshape(-1, 2).T.copy()
        self._sequences_at = np.array(sequences, np.int64)

    def __len__(self) -> int:
        """How many kernels it runs."""
        return len(self._program)

    @property
    def current(self) -> bool:
        """Whether the process still runs the kernels that were recorded."""
        return self._program.current

    def run(self, rows: int, sequences: int) -> Tensor:
        """Do the work for `rows` rows, at most `most_rows`, of `sequences` sequences."""
        self._arguments[self._rows_at] = self._a_row * rows
        self._arguments[self._sequences_at] = sequences
        self._program.run()
        return self._whole[:rows]


def record(work: Callable[[], Tensor], workspace: Workspace) -> Program:
    """Do the work once, and return what repeats it.

    Args:
        work: reads and writes tensors of the caller, which outlive the program; what it makes on
            the way may lie in the workspace.

    Raises:
        NotRecordable: it reads a value, or computes with torch.
    """
    return _recorded(work, workspace, at_once=True)


def record_rows(work: Callable[[], Tensor], workspace: Workspace, most_rows: int) -> RowsProgram:
    """What repeats the work over any number of its rows; nothing is computed yet.

    Args:
        work: as of `record`, over `most_rows` rows of which none depends on another but through
            the step's sequences; its result has as many.

    Raises:
        NotRecordable: as `record`, or a kernel is among the calls that has no number of rows.
    """
    return RowsProgram(_recorded(work, workspace, at_once=False), most_rows)


def _recorded(work: Callable[[], Tensor], workspace: Workspace, *, at_once: bool) -> Program:
    if backend.name is None:
        backend.select()
    library = backend.library
    if library is None:
        raise NotRecordable("the C++ kernels do not run here")
    recorder, allocations = _Recorder(library, at_once=at_once), _OnlyViews()
    with recorded_by(recorder), allocations:
        result = work()
    kept = [*allocations.made, *workspace.memory]
    return Program(library, recorder.calls, result, kept)


class _Recorder:
    """Stands for the library: keeps the calls, and makes them where that is to be done at once."""

    def __init__(self, library: ctypes.CDLL, *, at_once: bool) -> None:
        self._library, self._at_once = library, at_once
        self.calls: list[tuple[Any, Arguments]] = []

    def __getattr__(self, name: str) -> Callable[[Arguments], None]:
        function = getattr(self._library, name)

        def call(arguments: Arguments) -> None:
            if self._at_once:
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
