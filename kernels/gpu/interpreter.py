"""Mends Triton's interpreter where it computes something else than a GPU does.

As it comes (3.6 to 3.9), it cuts float32 off where bfloat16 or float8 would be rounded, and
multiplies bfloat16 matrices as if their bits were integers. Kernels must not know; so the two
functions at fault are replaced, once, when kernels are imported with TRITON_INTERPRET=1. It also
prepares Triton's language anew for every call of a device function, a quarter of its time: here it
does so once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

_CARRIERS = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}


def mend() -> None:
    """Replace them; a second call changes nothing."""
    from triton.runtime import interpreter

    interpreter._convert_float = convert_float
    interpreter._patch_lang = _once_for_each_language(interpreter._patch_lang)
    interpreter.InterpreterBuilder.create_dot = _create_dot


def _once_for_each_language(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch` prepares the language modules that a function sees, here for good."""
    from triton.runtime import interpreter

    done: set[frozenset[int]] = set()

    def patch_once(function: Any) -> Any:
        seen = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if seen not in done:
            patch(function)
            done.add(seen)
        return interpreter._LangPatchScope()

    return patch_once


def convert_float(
    values: NDArray[Any], source: tl.dtype, target: tl.dtype, _rounding: Any = None
) -> NDArray[Any]:
    """Bits of `source` floats to bits of `target` floats: round to nearest even, as torch does.

    float8_e4m3fn saturates at 448, as the GPU's conversion does; NaN stays NaN.
    """
    wide = _view(values, source)
    if target == tl.float8e4nv:
        wide = wide.float().clamp(-448.0, 448.0)
    out = wide.to(_torch_dtype(target))
    carrier = _CARRIERS[target.primitive_bitwidth]
    bits = out.view(getattr(torch, np.dtype(carrier).name)).numpy()
    return bits.view(f"u{target.primitive_bitwidth // 8}").reshape(values.shape)


def _view(values: NDArray[Any], dtype: tl.dtype) -> torch.Tensor:
    carrier = _CARRIERS[dtype.primitive_bitwidth]
    flat = np.frombuffer(bytearray(values.tobytes()), dtype=carrier)
    return torch.from_numpy(flat).view(_torch_dtype(dtype))


def _torch_dtype(dtype: tl.dtype) -> torch.dtype:
    return {
        "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
        "fp64": torch.float64, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    }[dtype.name]  # fmt: skip


def _create_dot(builder: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
    """a @ b + d with float operands widened to float32."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (_widened(x) for x in (a, b))
    return TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _widened(handle: Any) -> NDArray[Any]:
    data: NDArray[Any] = handle.data
    dtype = handle.dtype.scalar
    if dtype.is_floating() and dtype.primitive_bitwidth < 32:
        return _view(data, dtype).float().numpy().reshape(data.shape)
    return data
