"""Where a model's named tensors come from: a checkpoint's files, a trainer, or a random generator.

A source gives each tensor once and refuses, by name, what does not have the shape that is asked
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tokenfleet.engine.errors import CheckpointError

_FLOATS = ("F32", "F16", "BF16")
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


class TensorSource(Protocol):
    """What the loader needs. Names are those of the model's checkpoints."""

    @property
    def path(self) -> Path:
        """Where they come from, for messages."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def file_of(self, name: str) -> Path:
        """Where this one comes from."""
        ...

    def dtype_of(self, name: str) -> str | None:
        """safetensors' name of the tensor's dtype; None when there is no such tensor."""
        ...

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        ...

    def take(self, name: str, shape: Sequence[int], dtypes: Sequence[str] = _FLOATS) -> Tensor:
        """The tensor, which must have this shape and one of these dtypes; the caller copies it."""
        ...


class GivenTensors:
    """Tensors that a caller hands over, under the names of a checkpoint.

    Raises CheckpointError for a name that comes twice, and for what is no name with a tensor.
    """

    path = Path("the given tensors")

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._left: dict[str, Tensor] = {}
        for name, tensor in self._pairs(named):
            if name in self._left:
                raise CheckpointError(f"{self.path}: tensor {name} is given twice")
            self._left[name] = tensor
        self._all = dict(self._left)

    def _pairs(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What was given, if it is names and tensors."""
        for pair in named if isinstance(named, Iterable) else [named]:
            match pair:
                case (str() as name, Tensor() as tensor):
                    yield name, tensor
                case _:
                    raise CheckpointError(
                        f"{self.path}: weights are a directory or pairs of name and tensor (of a"
                        f" dictionary, its items()), got {pair!r:.50}"
                    )

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def again(self) -> GivenTensors:
        """The same tensors, none of them taken."""
        return GivenTensors(self._all.items())

    def file_of(self, name: str) -> Path:
        """They come from no file."""
        return self.path

    def dtype_of(self, name: str) -> str | None:
        """torch's own name for a dtype that safetensors has none for here."""
        tensor = self._all.get(name)
        return None if tensor is None else _NAMES.get(tensor.dtype, str(tensor.dtype))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """As it was given."""
        return tuple(self._all[name].shape)

    def take(self, name: str, shape: Sequence[int], dtypes: Sequence[str] = _FLOATS) -> Tensor:
        """Each once; CheckpointError names a tensor that is missing, used twice or not as asked."""
        tensor = self._left.pop(name, None)
        if tensor is None:
            state = "is used twice" if name in self._all else "is missing"
            raise CheckpointError(f"{self.path}: tensor {name} {state}")
        if tensor.shape != tuple(shape):
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {list(tensor.shape)},"
                f" the model asks for {list(shape)}"
            )
        if self.dtype_of(name) not in dtypes:
            raise CheckpointError(
                f"{self.path}: tensor {name} has dtype {self.dtype_of(name)}, supported are"
                f" {', '.join(dtypes)}"
            )
        return tensor.detach()

    def close(self) -> None:
        """Raise CheckpointError when a tensor was left over, naming up to five."""
        if self._left:
            names = list(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(
                f"{self.path}: no part of the model takes the tensor {', '.join(names[:5])}{more}"
            )


class RandomTensors:
    """Random weights of any shape, made where they are needed: for measuring, and for tests.

    Norms are one, embeddings small, and the rest scaled by fan-in, so that activations stay in
    range through any number of layers.
    """

    path = Path("random tensors")

    def __init__(self, device: torch.device, seed: int = 0, *, tied: bool = False) -> None:
        self._device, self._tied = device, tied
        self._random = torch.Generator(device=device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return not (self._tied and name == "lm_head.weight") and not name.endswith("_scale")

    def file_of(self, name: str) -> Path:
        """They come from no file."""
        return self.path

    def dtype_of(self, name: str) -> str | None:
        """F32 for every name but those of scales, and of the head where it is tied."""
        return "F32" if name in self else None

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError: only who takes a tensor knows its shape."""
        raise CheckpointError(f"{self.path}: {name} has no shape of its own")

    def take(self, name: str, shape: Sequence[int], dtypes: Sequence[str] = _FLOATS) -> Tensor:
        """Random numbers of any shape asked for: bfloat16; fp32 for norms and biases."""
        if len(shape) == 1:
            fill = torch.zeros if name.endswith(".bias") else torch.ones
            return fill(*shape, device=self._device)
        noise = torch.randn(
            *shape, generator=self._random, device=self._device, dtype=torch.bfloat16
        )
        return noise.mul_(0.02 if "embed" in name else shape[-1] ** -0.5)
