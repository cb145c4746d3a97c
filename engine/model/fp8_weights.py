"""A projection that the checkpoint keeps in FP8: its codes, and the scales that belong to them.

The parts of a fused projection (q, k, v; gate, up) keep their own scales: nothing is rounded a
second time. A scale that is missing, of another shape or no number is an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenfleet.engine.errors import CheckpointError
from tokenfleet.engine.model.quantization import is_ignored
from tokenfleet.engine.model.spec import Fp8Spec
from tokenfleet.engine.model.tensor_source import TensorSource
from tokenfleet.kernels.fp8 import FP8, Fp8Scales

STORED = "F8_E4M3"  # safetensors' name
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")  # both are factors on the codes
_INPUT_SCALES = ("input_scale", "activation_scale")


def is_in_fp8(checkpoint: TensorSource, fp8: Fp8Spec | None, modules: Sequence[str]) -> bool:
    """Whether these parts of one projection are in FP8: all of them or none.

    Raises CheckpointError when the tensors are not what config.json says of them.
    """
    narrow = [m for m in modules if checkpoint.dtype_of(f"{m}.weight") == STORED]
    for module in narrow:
        if fp8 is None or is_ignored(module, fp8.ignored):
            why = "names no FP8" if fp8 is None else "lists this module as not converted"
            raise CheckpointError(
                f"{checkpoint.file_of(f'{module}.weight')}: tensor {module}.weight has dtype"
                f" {STORED}, but config.json's quantization_config {why}"
            )
    if narrow and len(narrow) < len(modules):
        other = next(m for m in modules if m not in narrow)
        raise CheckpointError(
            f"{checkpoint.file_of(f'{other}.weight')}: tensor {other}.weight is not in FP8 while"
            f" {narrow[0]}.weight is; both are parts of one projection"
        )
    return bool(narrow)


def take_fp8(
    checkpoint: TensorSource,
    fp8: Fp8Spec,
    modules: Sequence[str],
    rows: Sequence[int],
    columns: int,
    device: torch.device,
) -> tuple[Tensor, Fp8Scales]:
    """Codes [sum(rows), columns] of the parts, one below the other, and their scales."""
    codes = torch.empty((sum(rows), columns), dtype=FP8, device=device)
    for module, part in zip(modules, torch.split(codes, list(rows)), strict=True):
        name = f"{module}.weight"
        part.copy_(checkpoint.take(name, (len(part), columns), dtypes=(STORED,)))
    scales = [_weight_scale(checkpoint, fp8, m, n, columns) for m, n in zip(modules, rows)]
    height = 1
    if fp8.block is not None:
        height = fp8.block[0]
        if any(n % height for n in rows[:-1]):  # a block would reach into the next part
            scales = [s.repeat_interleave(height, 0)[:n] for s, n in zip(scales, rows)]
            height = 1
    return codes, Fp8Scales(
        weight=torch.cat(scales).contiguous().to(device),
        rows=height,
        columns=columns if fp8.block is None else fp8.block[1],
        activations=fp8.activations,
        input=_input_scale(checkpoint, modules, device) if fp8.activations == "static" else None,
    )


def take_kv_scales(checkpoint: TensorSource, attention: str) -> tuple[float, float]:
    """The scales of a layer's cached keys and values; 1 where the checkpoint brings none."""
    names = [_name_in(checkpoint, f"{attention}.{x}_scale", f"{attention}.{x}_proj.{x}_scale")
             for x in ("k", "v")]  # fmt: skip
    if names == [None, None]:
        return 1.0, 1.0
    scales = []
    for name, missing in zip(names, ("k_scale", "v_scale"), strict=True):
        if name is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {attention}.{missing} is missing")
        scale = _take_scale(checkpoint, name)
        if scale.numel() != 1:
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: tensor {name} must hold one number, has"
                f" {scale.numel()}"
            )
        scales.append(float(scale))
    return scales[0], scales[1]


def _weight_scale(
    checkpoint: TensorSource, fp8: Fp8Spec, module: str, rows: int, columns: int
) -> Tensor:
    """fp32 [rows, 1], or [blocks, blocks] in the block form."""
    name = _name_of(checkpoint, module, _WEIGHT_SCALES, f"{module}.weight")
    shape = checkpoint.shape_of(name)
    wanted: list[tuple[int, ...]]
    if fp8.block is not None:
        wanted = [(-(-rows // fp8.block[0]), -(-columns // fp8.block[1]))]
    else:
        wanted = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if shape not in wanted:
        raise CheckpointError(
            f"{checkpoint.file_of(name)}: tensor {name} has shape {list(shape)}, a weight of"
            f" {rows} x {columns} asks for {' or '.join(str(list(w)) for w in wanted)}"
        )
    scale = _take_scale(checkpoint, name)
    return scale if fp8.block is not None else scale.reshape(-1, 1).expand(rows, 1)


def _input_scale(checkpoint: TensorSource, modules: Sequence[str], device: torch.device) -> Tensor:
    """fp32 [1]: the parts share their inputs, so the largest of their scales rounds for all."""
    names = [_name_of(checkpoint, m, _INPUT_SCALES, f"the inputs of {m}") for m in modules]
    scales = [_take_scale(checkpoint, name).reshape(-1) for name in names]
    for name, scale in zip(names, scales):
        if len(scale) != 1:
            raise CheckpointError(
                f"{checkpoint.file_of(name)}: tensor {name} must hold one number, has {len(scale)}"
            )
    return torch.stack(scales).amax(0).to(device)


def _name_of(checkpoint: TensorSource, module: str, suffixes: Sequence[str], what: str) -> str:
    names = [f"{module}.{suffix}" for suffix in suffixes]
    if found := _name_in(checkpoint, *names):
        return found
    raise CheckpointError(
        f"{checkpoint.path}: tensor {names[0]} (or {names[1]}) is missing: {what} cannot be scaled"
    )


def _name_in(checkpoint: TensorSource, *names: str) -> str | None:
    return next((name for name in names if name in checkpoint), None)


def _take_scale(checkpoint: TensorSource, name: str) -> Tensor:
    scale = checkpoint.take(name, checkpoint.shape_of(name)).float()
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise CheckpointError(
            f"{checkpoint.file_of(name)}: tensor {name} holds a scale that is no finite number"
            " above 0"
        )
    return scale
