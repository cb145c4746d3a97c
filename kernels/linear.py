"""Linear layers over weights that are laid out once for the fastest product on this machine.

A PackedWeight owns its bytes: after `pack_linear` the caller may drop the original, and no second
copy is kept. What is computed depends on weight, bias and quantization alone, never on the layout.

    plain    [out, in] as given; torch's own product
    onednn   reordered by oneDNN for its product
    blocks   bf16 in the blocks of tiles.h; the C++ product, on AMX, AVX-512 BF16 or AVX2
    int8     [out, in] int8 and a scale per output; torch's int8 product
    int8 blocks  the same values in the blocks of tiles.h; the C++ product, on AMX, VNNI or AVX2
    two bytes  int8 blocks, whose inputs are held in two bytes each, or in fp32; the C++ product
    fp8      [out, in] e4m3 codes and their scales (fp8.py)
"""

import ctypes
import struct
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tokenfleet.kernels import fp8
from tokenfleet.kernels.backend import DTYPE_CODES, compiled, uses_triton
from tokenfleet.kernels.fp8 import Fp8Rows, Fp8Scales
from tokenfleet.kernels.workspace import new_result

Rounding = Fp8Scales | Literal["int8"]
"""What a product's inputs may be rounded to by whoever makes them: Fp8Rows, Int8Rows."""

QUANTIZATIONS = ("int8", "fp8", "fp8_block")

# oneDNN lays a weight out for an expected number of rows; this one was the best or equal to it at
# every number of rows from 1 to 564
ROWS_HINT = 32

# the features of linear.cpp; its argument struct in two parts, and that of the rounding alone
INT8, BF16_BLOCKS = 1, 2
_FUNCTIONS = {
    "blocks": "tf_linear_bf16",
    "int8 blocks": "tf_linear_int8",
    "two bytes": "tf_linear_two_bytes",
}
_PACK_WEIGHT = struct.Struct("@4P2q").pack
_PACK_CALL = struct.Struct("@2P4qP").pack
_PACK_QUANTIZE = struct.Struct("@3P3q").pack


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations [T, K] as a product in int8 takes them: values x scale; see quantize_rows."""

    values: Tensor  # int8 [T, K, filled up with zeros to a multiple of 64]
    scales: Tensor  # fp32 [T]
    shape: tuple[int, int]
    dtype: torch.dtype  # of what they were made from, and of the product


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] in the layout that `linear` reads."""

    out_features: int
    in_features: int
    dtype: torch.dtype  # of inputs and outputs
    layout: str  # one of the module's table
    data: Tensor
    bias: Tensor | None  # [out_features], in dtype
    scale: Tensor | None = None  # int8: fp32 [out_features]
    offset: Tensor | None = None  # int8 blocks: int32 [out_features], 128 x the sum of its weights
    packed: bytes = b""  # blocks: the head of the arguments of linear.cpp
    fp8: Fp8Scales | None = None  # fp8: the scales of its codes

    @property
    def rounding(self) -> Rounding | None:
        """How `linear` rounds its inputs, for whoever makes them; None: it does not, or alone."""
        if self.layout == "int8 blocks":
            return "int8"
        return self.fp8 if self.fp8 is not None and self.fp8.activations != "none" else None

    @property
    def num_bytes(self) -> int:
        """What reading the weight once reads, its scales and bias included."""
        if self.fp8 is not None:
            bias = 0 if self.bias is None else self.bias.nbytes
            return self.data.nbytes + self.fp8.num_bytes + bias
        width = self.dtype.itemsize if self.scale is None else 1
        packed = self.out_features * self.in_features * width
        return packed + sum(x.nbytes for x in (self.bias, self.scale, self.offset) if x is not None)


def pack_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    quantization: str | None = None,
    dtype: torch.dtype | None = None,
) -> PackedWeight:
    """Pack weight [out, in] and bias [out]; nothing else keeps them alive.

    quantization None keeps the weight's values and dtype; "int8" rounds each output's weights to
    int8 by its own scale, and `linear` rounds each token's activations likewise; "fp8" does the
    same in FP8, "fp8_block" in blocks of 128 x 128 (activations: groups of 128). "int8_weights"
    rounds the weights alone, and a weight in 16 bits only, where the C++ kernels read half the
    bytes for it; elsewhere it is kept as it is. dtype: of inputs and outputs, where quantization is
    "int8"; None = the weight's.
    """
    known = (*QUANTIZATIONS, "int8_weights")
    if quantization not in (None, *known):
        raise ValueError(
            f"quantization must be None or one of {', '.join(known)}, got {quantization!r}"
        )
    if quantization in ("fp8", "fp8_block"):
        form: fp8.Form = "rows" if quantization == "fp8" else "blocks"
        return pack_fp8(*fp8.quantize_weight(weight, form), bias, dtype=weight.dtype)
    out_features, in_features = weight.shape
    dtype = dtype if dtype is not None and quantization == "int8" else weight.dtype
    bias = None if bias is None else bias.to(dtype).contiguous()
    shape = (out_features, in_features, dtype)
    library = compiled(weight)
    features = library.tf_linear_features() if library else 0
    if quantization == "int8":
        values, scale = _quantize_weight(weight.contiguous(), library)
        if not features & INT8:
            return PackedWeight(*shape, "int8", values, bias, scale)
        offset = 128 * values.sum(dim=1, dtype=torch.int32)
        return _in_blocks(*shape, "int8 blocks", to_blocks(values), bias, scale, offset)
    if quantization == "int8_weights" and features & INT8 and weight.dtype.itemsize == 2:
        values, scale = _quantize_weight(weight.contiguous(), library)
        offset = 128 * values.sum(dim=1, dtype=torch.int32)
        return _in_blocks(*shape, "two bytes", to_blocks(values), bias, scale, offset)
    if features & BF16_BLOCKS and weight.dtype == torch.bfloat16 and in_features % 32 == 0:
        return _in_blocks(*shape, "blocks", to_blocks(weight), bias)
    if _onednn_takes(weight) and not uses_triton(weight):
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), ROWS_HINT)
        return PackedWeight(*shape, "onednn", packed, bias)
    return PackedWeight(*shape, "plain", weight.contiguous(), bias)


def pack_fp8(
    codes: Tensor, scales: Fp8Scales, bias: Tensor | None = None, *, dtype: torch.dtype
) -> PackedWeight:
    """Pack a weight that is in FP8 already; dtype: of inputs and outputs."""
    bias = None if bias is None else bias.to(dtype).contiguous()
    out_features, in_features = codes.shape
    return PackedWeight(
        out_features, in_features, dtype, "fp8", codes.contiguous(), bias, fp8=scales
    )


def linear(x: Tensor | Fp8Rows | Int8Rows, packed: PackedWeight) -> Tensor:
    """x [T, in] -> [T, out] in x's dtype, which must be the packed weight's. A weight that has a
    `rounding` also takes x rounded so already."""
    layout = packed.layout
    if isinstance(x, Int8Rows):
        if layout != "int8 blocks":
            raise TypeError(f"x is in int8 and the weight in {layout!r}; pass x as it was")
        return _on_blocks(x, packed)
    if packed.fp8 is not None:
        if uses_triton(packed.data):
            from tokenfleet.kernels.gpu import linear as gpu

            return gpu.fp8_linear(x, packed.data, packed.fp8, packed.bias)
        return fp8.reference(x, packed.data, packed.fp8, packed.bias)
    if isinstance(x, Fp8Rows):
        raise TypeError(f"x is in FP8 and the weight in the layout {layout!r}; pass x as it was")
    if layout == "plain":
        if uses_triton(x):
            from tokenfleet.kernels.gpu import linear as gpu

            if gpu.takes(x, packed.data):
                return gpu.few_rows(x, packed.data, packed.bias)
        return torch.nn.functional.linear(x, packed.data, packed.bias)
    if layout == "int8":
        return int8_reference(x, packed.data, packed.scale, packed.bias)  # type: ignore[arg-type]
    if layout == "onednn":
        if not x.shape[0]:
            return x.new_empty((0, packed.out_features))
        return torch.ops.mkldnn._linear_pointwise.default(  # type: ignore[no-any-return]
            x, packed.data, packed.bias, "none", [], ""
        )
    return _on_blocks(x, packed)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification: sums in fp32, rounded once."""
    out = x.float() @ weight.float().t()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def int8_reference(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification of int8: exact integer sums, then one rounding of sums x both scales."""
    rounded, token_scale = quantize_rows(x)
    sums = torch._int_mm(rounded, values.t()) if x.shape[0] else x.new_zeros((0, len(values)))
    out = sums.float() * (scale * token_scale[:, None])
    return (out if bias is None else out + bias.float()).to(x.dtype)


def two_bytes_reference(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The specification of int8_weights, up to what two bytes lose of an input."""
    out = x.float() @ values.float().t() * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] -> int8 [N, K] and fp32 scales [N]: x ~ values * scale, scale = max |row| / 127."""
    wide = x.float()
    highest = wide.abs().amax(dim=1)
    # a true division: number / tensor would multiply by a rounded reciprocal
    inverse = torch.where(highest > 0, torch.full_like(highest, 127.0) / highest, 0.0)
    values = (wide * inverse[:, None]).nan_to_num(0.0).round().to(torch.int8)
    return values, highest / 127.0


def to_blocks(weight: Tensor) -> Tensor:
    """[N, K] int8 or bf16 -> uint8 [N / 16, K bytes / 64, 16, 64], the order of tiles.h.

    Outputs and depth are filled up with zeros.
    """
    data = weight.contiguous().view(torch.uint8)
    columns, depth = -(-data.shape[0] // 16), -(-data.shape[1] // 64)
    padding = (0, depth * 64 - data.shape[1], 0, columns * 16 - data.shape[0])
    if any(padding):
        data = torch.nn.functional.pad(data, padding)
    blocks = data.view(torch.int32).view(columns, 16, depth, 16)  # four bytes move together
    return blocks.permute(0, 2, 3, 1).contiguous().view(torch.uint8)


def _in_blocks(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    layout: str,
    data: Tensor,
    bias: Tensor | None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
) -> PackedWeight:
    pointers = (0 if x is None else x.data_ptr() for x in (data, scale, offset, bias))
    packed = _PACK_WEIGHT(*pointers, in_features, out_features)
    return PackedWeight(out_features, in_features, dtype, layout, data, bias, scale, offset, packed)


def _quantize_weight(weight: Tensor, library: ctypes.CDLL | None) -> tuple[Tensor, Tensor]:
    """quantize_rows, compiled where it can be: a model has many weights."""
    if library is None:
        return quantize_rows(weight)
    values = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0])
    library.tf_quantize_rows(
        _PACK_QUANTIZE(
            weight.data_ptr(), values.data_ptr(), scale.data_ptr(),
            *weight.shape, DTYPE_CODES[weight.dtype],
        )
    )  # fmt: skip
    return values, scale


def _onednn_takes(weight: Tensor) -> bool:
    if not (weight.is_cpu and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def _on_blocks(x: Tensor | Int8Rows, packed: PackedWeight) -> Tensor:
    rows, scales = (x.values, x.scales) if isinstance(x, Int8Rows) else (x, None)
    library = compiled(rows if scales is None else scales)
    if library is None:  # packed for the C++ kernels, which have been switched off since
        raise ValueError(f"a weight in the layout {packed.layout!r} needs the C++ kernels")
    if x.dtype != packed.dtype or x.shape[1] != packed.in_features:
        raise ValueError(
            f"x must be {packed.dtype} [T, {packed.in_features}], got {x.dtype} {tuple(x.shape)}"
        )
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = new_result((x.shape[0], packed.out_features), x.dtype)
    function = getattr(library, _FUNCTIONS[packed.layout])
    function(
        packed.packed
        + _PACK_CALL(
            rows.data_ptr(), out.data_ptr(), rows.stride(0), rows.shape[0], DTYPE_CODES[x.dtype], 0,
            0 if scales is None else scales.data_ptr(),
        )
    )  # fmt: skip
    return out
