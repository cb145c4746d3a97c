"""How every Triton kernel is started, and how its launches are recorded in place of being run.

A launch is described by what is passed to `launch` alone; so what `recording` writes down is
exactly what a GPU would compile, and the ahead-of-time suite needs no second list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from tokenfleet.kernels.backend import backend
from tokenfleet.kernels.gpu import interpreter

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter; decided when triton is imported, for good."""

FUSED = True
"""a * b + c rounds once; said to the compiler, because its default is about to change."""

EARLY: bool = os.environ.get("TOKENFLEET_EARLY_LAUNCH") == "1" and not INTERPRETED
"""Whether kernels that can do so begin while the one before them ends, and wait for it themselves
(programmatic dependent launch). Off until it has been measured and compared on a GPU."""

if INTERPRETED:
    interpreter.mend()


@dataclass(frozen=True, slots=True)
class Gpu:
    """What launch configurations depend on. A table of launches has one column an `arch`."""

    arch: int
    """80, 90 or 100: the newest of these generations that the device's own is built on."""
    num_sms: int

    @property
    def early(self) -> bool:
        """Whether kernels may begin before the one in front of them has ended."""
        return EARLY and self.arch >= 90

    @property
    def native_fp8(self) -> bool:
        """Whether Triton converts float8_e4m3fn itself; otherwise kernels take the bytes apart."""
        return self.arch >= 90


TARGETS = {80: Gpu(80, 108), 90: Gpu(90, 132), 100: Gpu(100, 148)}
"""A100, H100 and B200: what ahead-of-time compilation is for."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as Triton's compiler sees it."""

    kernel: Any  # a JITFunction
    signature: dict[str, str]  # every parameter: "*bf16", "i32", "constexpr", ...
    constants: dict[str, Any]  # those of type "constexpr"
    divisible: tuple[int, ...]  # indices of the parameters that 16 divides
    num_warps: int
    num_stages: int
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # as they were passed, tensors by their dtypes
    early: bool = False

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.kernel.__name__)

    def key(self) -> tuple[Any, ...]:
        """Equal for launches that share one binary."""
        constants = tuple((k, repr(v)) for k, v in self.constants.items())
        types = tuple(self.signature.items())
        options = self.num_warps, self.num_stages, self.early
        return self.name, types, constants, self.divisible, *options

    def compile(self) -> None:
        """Fill Triton's cache with what this launch will ask for; needs a CUDA device.

        That is the binary and, before triton 3.7, a launcher that a C compiler makes. Nothing is
        done where a tensor is not aligned: Triton would be told that it is.
        """
        told = {self.kernel.arg_names[i] for i in self.divisible}
        told.update(_named(self.kernel, "_on_alignment"))
        if all(name in told or kind[0] != "*" for name, kind in self.signature.items()):
            options = _options(self.num_warps, self.num_stages, early=self.early)
            made = self.kernel.warmup(
                *self.args, grid=self.grid, **options, **self.constants_by_name
            )
            assert made.run is not None  # asking for it loads the binary and makes the launcher

    @property
    def constants_by_name(self) -> dict[str, Any]:
        """Constants that were passed by name: those behind the arguments."""
        names = self.kernel.arg_names[len(self.args) :]
        return {name: self.constants[name] for name in names}


@dataclass(slots=True)
class _Recorder:
    """`launches` is None while launches run; `gpu` stands for a device that is none."""

    launches: list[Launch] | None = None
    gpu: Gpu = field(default_factory=lambda: TARGETS[90])


_recorder = _Recorder()


@contextmanager
def recording(gpu: Gpu) -> Iterator[list[Launch]]:
    """Write launches down as if for `gpu`, and run none; tensors may be meta or fake.

    Operations take their Triton form on every device meanwhile. Not for concurrent threads.
    """
    before = _recorder.launches, _recorder.gpu, backend.name, backend.triton_devices
    launches: list[Launch] = []
    _recorder.launches, _recorder.gpu = launches, gpu
    # a name, because whoever finds none would choose anew
    backend.name, backend.triton_devices = "triton", frozenset(("cuda", "meta", "cpu"))
    try:
        yield launches
    finally:
        _recorder.launches, _recorder.gpu, backend.name, backend.triton_devices = before


@contextmanager
def planning(gpu: Gpu) -> Iterator[None]:
    """Let launches run, on interpreted tensors, as they would be configured for `gpu`."""
    before = _recorder.gpu
    _recorder.gpu = gpu
    try:
        yield
    finally:
        _recorder.gpu = before


def gpu_of(device: torch.device) -> Gpu:
    """The device's generation; for meta, fake and interpreted tensors the planned one."""
    if _recorder.launches is not None or device.type != "cuda":
        return _recorder.gpu
    return _real_gpu(device)


@lru_cache
def _real_gpu(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    # consumer cards of generations 8 and 12 have the shared memory of neither 90 nor 100
    arch = {9: 90, 10: 100, 11: 100}.get(found.major, 80)
    return Gpu(arch, found.multi_processor_count)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 1,
    early: bool = False,
    **constants: Any,
) -> None:
    """Start `kernel`: parameters in order, constexprs by name. An empty grid runs nothing.

    early: it may begin before what was launched before it has ended. It must wait for that itself
    (`gdc_wait`), in every program and before it reads or writes anything.
    """
    if 0 in grid:
        return
    if _recorder.launches is not None:
        described = _describe(kernel, grid, args, constants, num_warps, num_stages, early=early)
        _recorder.launches.append(described)
        return
    kernel[grid](*args, **_options(num_warps, num_stages, early=early), **constants)


def _options(num_warps: int, num_stages: int, *, early: bool) -> dict[str, int | bool]:
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": FUSED}
    return options | {"launch_pdl": True} if early else options


_DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv", torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


def _describe(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
    *,
    early: bool,
) -> Launch:
    """The specialisation that Triton's own launcher would choose for these arguments."""
    names = kernel.arg_names
    given = dict(zip(names, args, strict=False))
    values = {**given, **constants}
    missing = [name for name in names if name not in values]
    if missing or len(values) != len(names):
        raise TypeError(f"{kernel.__name__} takes {names}, got {list(values)}")
    signature, constexprs, divisible = {}, {}, []
    plain, anywhere = (_named(kernel, key) for key in ("", "_on_alignment"))
    for index, name in enumerate(names):
        constant, special = name in constants, name not in plain
        kind, aligned = _parameter(values[name], constant=constant, special=special)
        aligned &= name not in anywhere
        signature[name] = kind
        if kind == "constexpr":
            constexprs[name] = values[name]
        if aligned:
            divisible.append(index)
    kept = tuple(x.dtype if isinstance(x, Tensor) else x for x in args)
    return Launch(
        kernel, signature, constexprs, tuple(divisible), num_warps, num_stages, tuple(grid), kept,
        early,
    )  # fmt: skip


def _named(kernel: Any, key: str) -> list[str]:
    """Names in the decorator's do_not_specialize{key}, of a compiled or an interpreted kernel."""
    given = kernel.kwargs if INTERPRETED else vars(kernel)
    return list(given.get(f"do_not_specialize{key}") or ())


def _parameter(value: Any, *, constant: bool, special: bool) -> tuple[str, bool]:
    """(Triton type, whether it is compiled for 16 dividing it); `special`: values are looked at."""
    if constant or value is None or (special and isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, Tensor):
        return "*" + _DTYPES[value.dtype], value.storage_offset() * value.itemsize % 16 == 0
    if isinstance(value, int):
        kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return kind, special and value % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    raise TypeError(f"a kernel parameter is a tensor, int, float or None, got {value!r}")
