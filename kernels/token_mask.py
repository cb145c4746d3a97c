"""What a grammar forbids of a row of logits, from one bit a token.

The host finds out which tokens are allowed; as bits they are a thirty-second of the logits' size on
their way to the device.

Shapes: R rows of logits, of which N are masked; V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokenfleet.kernels.backend import uses_triton


def allow_only(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set logits fp32 [R, V] to -inf, in place, where a token is not allowed.

    rows int64 [N]: which rows, ascending. words int32 [N, W]: token v of rows[i] is allowed
    where bit v % 32 of words[i, v // 32] is 1; a token behind the words is not.
    """
    if uses_triton(logits) and logits.stride(1) == 1:
        from tokenfleet.kernels.gpu import token_mask as gpu

        gpu.allow_only(logits, rows, words)
    else:
        reference(logits, rows, words)


def reference(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """The specification."""
    V = logits.shape[1]
    forbidden = (_bits(words) == 0)[:, :V]
    behind = V - forbidden.shape[1]
    if behind > 0:
        forbidden = torch.nn.functional.pad(forbidden, (0, behind), value=True)
    if len(rows) == len(logits):  # in place: a copy of the logits takes longer than all the rest
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


def _bits(words: Tensor) -> Tensor:
    """int32 [N, W] -> uint8 [N, 32 W] of 0 and 1."""
    octets = words.contiguous().view(torch.uint8)  # in order of their bits on every machine we know
    if octets.is_cpu:  # numpy's own form is the faster one
        return torch.from_numpy(np.unpackbits(octets.numpy(), axis=1, bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    return (octets[:, :, None].bitwise_right_shift(places) & 1).flatten(1)
