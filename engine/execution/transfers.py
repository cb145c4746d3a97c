"""Between the host's memory and the device's, without either waiting for the other.

What is sent was copied before `send` returns, so the caller may reuse the array; what is fetched is
read only behind `wait`, which is the one place where a step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Wait = Callable[[], list[Tensor]]
"""Gives the fetched tensors on the host, once they are there."""


class Transfers(Protocol):
    """How a runner's arrays reach its device, and how results come back."""

    def send(self, array: NDArray[Any]) -> Tensor:
        """The array on the device; work queued from now on sees it."""
        ...

    def refill(self, tensor: Tensor, array: NDArray[Any]) -> None:
        """Overwrite a tensor of the device; it keeps its address."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """Begin to copy what the work queued so far will have made of these tensors."""
        ...


class HostTransfers:
    """Host and device are one: nothing is copied."""

    def send(self, array: NDArray[Any]) -> Tensor:
        """The array itself where it is contiguous."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def refill(self, tensor: Tensor, array: NDArray[Any]) -> None:
        """A plain copy."""
        tensor.copy_(torch.from_numpy(array))

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """The tensors as they are."""
        kept = list(tensors)
        return lambda: kept


class CudaTransfers:
    """Pinned buffers from torch's caching host allocator, and a stream of its own for results.

    The allocator gives a pinned buffer out again only when the copies that used it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, array: NDArray[Any]) -> Tensor:
        """Copied by way of a pinned buffer, in the order of the main stream."""
        return _pinned(array).to(self._device, non_blocking=True)

    def refill(self, tensor: Tensor, array: NDArray[Any]) -> None:
        """The same into a tensor that is there."""
        tensor.copy_(_pinned(array), non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> Wait:
        """Copied on the side, so that the next step does not queue behind it."""
        main = torch.cuda.current_stream(self._device)
        self._cuda_stream.wait_stream(main)
        arriving = []
        with torch.cuda.stream(self._cuda_stream):
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                arriving.append(host.copy_(tensor, non_blocking=True))
                tensor.record_stream(self._cuda_stream)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._cuda_stream)

        def wait() -> list[Tensor]:
            arrived.synchronize()
            return arriving

        return wait


def _pinned(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory()


def transfers_for(device: torch.device) -> Transfers:
    """What this device needs."""
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()
