"""New weights for a loaded decoder, and old ones carried elsewhere.

New ones are written into the memory of the old: graphs keep their addresses, and there are never
two copies. Everything that can be wrong with them is found by building the decoder once without
memory, before the first one is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tokenfleet.engine.errors import CheckpointError
from tokenfleet.engine.model.checkpoint import Checkpoint
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.loader import Loader
from tokenfleet.engine.model.mlp import GroupedMoeMlp
from tokenfleet.engine.model.tensor_source import GivenTensors, TensorSource
from tokenfleet.kernels.linear import PackedWeight
from tokenfleet.kernels.moe import ExpertWeights

NewWeights = str | Path | Iterable[tuple[str, Tensor]]
"""A checkpoint's directory, or tensors under a checkpoint's names."""

_T = TypeVar("_T")
_ADDRESSES = "packed"
"""Field of a PackedWeight that names the addresses of the others."""


class WeightUpdate:
    """Weights that have been checked and not been written.

    Args:
        given: tensors must stay as they are until `write` returns.

    Raises:
        CheckpointError: a tensor is missing, left over, given twice, or of the wrong shape, dtype
            or form; nothing was changed.
    """

    def __init__(self, decoder: Decoder, given: NewWeights, quantization: str | None) -> None:
        self._decoder = decoder
        self._quantization = quantization
        self._open = _opener(given)
        with torch.no_grad(), self._open() as source:
            planned = self._loader(source, torch.device("meta")).decoder()
            _check_form(decoder.layers, planned.layers)
            _check_form(decoder.lm_head, planned.lm_head, "lm_head")

    def write(self) -> None:
        """Overwrite the old weights, a layer at a time.

        Raises:
            CheckpointError: a file changed since it was checked; some weights are new then.
        """
        decoder = self._decoder
        with torch.inference_mode(), self._open() as source:
            loader = self._loader(source, decoder.device)
            _overwrite(decoder.embedding, loader.embedding())
            tables = [layer.attention.cos_sin for layer in decoder.layers]
            new = loader.layers(decoder.embedding, tables)
            for layer, with_new in zip(decoder.layers, new, strict=True):
                _overwrite(layer, with_new)
            _overwrite(decoder.final_norm, loader.final_norm())
            _overwrite(decoder.lm_head, loader.head(decoder.embedding))

    def _loader(self, source: TensorSource, device: torch.device) -> Loader:
        d = self._decoder
        stacked = any(isinstance(layer.mlp, GroupedMoeMlp) for layer in d.layers)
        return Loader(
            source, d.spec, d.dtype, device, self._quantization, d.kv_dtype, stacked,
            sample=d.sample,
        )  # fmt: skip


def _opener(given: NewWeights) -> Callable[[], AbstractContextManager[TensorSource]]:
    """Opens the source anew; leaving it cleanly refuses what was left over."""
    if isinstance(given, (str, Path)):
        path = Path(given)
        return lambda: Checkpoint(path)
    tensors = GivenTensors(given)

    @contextmanager
    def again() -> Any:
        source = tensors.again()
        yield source
        source.close()

    return again


def _check_form(old: Any, new: Any, name: str = "the model") -> None:
    """Refuse projections that are kept in another form (FP8 or not, with a bias or without)."""
    if isinstance(old, (PackedWeight, ExpertWeights)):
        if _form(old) != _form(new):
            raise CheckpointError(
                f"{name}: the new weights are kept as {_form(new)}, the engine was started with"
                f" {_form(old)}; start a new one for them"
            )
    elif isinstance(old, tuple):
        for one, another in zip(old, new, strict=True):
            _check_form(one, another, name)
    elif dataclasses.is_dataclass(old):
        for field, part in _fields(old):
            _check_form(part, getattr(new, field), field)


def _form(weight: PackedWeight | ExpertWeights) -> str:
    if isinstance(weight, ExpertWeights):
        return f"{'fp8' if weight.fp8 else 'plain'} experts {tuple(weight.data.shape)}"
    form = "int8" if weight.layout.startswith("int8") else "fp8" if weight.fp8 else "plain"
    bias = "" if weight.bias is None else " with a bias"
    return f"{form} {weight.out_features} x {weight.in_features}{bias}"


def _overwrite(old: Any, new: Any) -> None:
    """Copy all tensors of a part of a decoder into those of another."""
    if old is new:
        return
    if isinstance(old, Tensor):
        old.copy_(new)
    elif isinstance(old, (tuple, list)):
        for one, another in zip(old, new, strict=True):
            _overwrite(one, another)
    elif dataclasses.is_dataclass(old):
        for name, part in _fields(old):
            if name != _ADDRESSES:
                _overwrite(part, getattr(new, name))
    elif old != new:
        raise CheckpointError(f"the new weights come with {new!r} where the old had {old!r}")


def moved(decoder: Decoder, move: Callable[[Tensor], Tensor]) -> Decoder:
    """The same decoder with every tensor moved, once for each however often it is used."""
    known: dict[int, Tensor] = {}

    def one(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = move(tensor)
        return known[id(tensor)]

    return Decoder(
        decoder.spec,
        embedding=one(decoder.embedding),
        layers=[_moved(layer, one) for layer in decoder.layers],
        final_norm=one(decoder.final_norm),
        lm_head=_moved(decoder.lm_head, one),
        kv_dtype=decoder.kv_dtype,
        sample=decoder.sample,
    )


def num_bytes(decoder: Decoder) -> int:
    """Of all its tensors, each counted once."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    moved(decoder, count)
    return total


def _moved(part: _T, one: Callable[[Tensor], Tensor]) -> _T:
    if isinstance(part, Tensor):
        return one(part)  # type: ignore[return-value] # a tensor for a tensor
    if isinstance(part, tuple):
        return tuple(_moved(each, one) for each in part)  # type: ignore[return-value] # same shape
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        changed = {name: _moved(value, one) for name, value in _fields(part)}
        return dataclasses.replace(part, **changed)
    return part


def _fields(part: Any) -> Iterable[tuple[str, Any]]:
    names = (field.name for field in dataclasses.fields(part) if field.init)
    return [(name, getattr(part, name)) for name in names]
