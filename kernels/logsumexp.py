"""log(sum(exp(row))): what turns logits into log probabilities without writing them all.

A log probability is `logit - logsumexp(row)`; few of a row's are ever asked for. torch's own form
makes two temporaries of the logits' size; the compiled one reads and writes nothing else.

Shapes: R rows, V vocabulary.
"""

import struct

import torch
from torch import Tensor

from tokenfleet.kernels.backend import compiled

_PACK = struct.Struct("@2P2q").pack
"""The argument struct of logsumexp.cpp."""


def logsumexp(logits: Tensor) -> Tensor:
    """fp32 [R] of fp32 [R, V]. Rows of -inf give -inf; what a row with NaN or +inf gives is not
    specified: such rows are poisoned."""
    library = compiled(logits)
    if library is None or logits.dtype != torch.float32 or not logits.is_contiguous():
        return logits.logsumexp(-1)
    out = torch.empty(logits.shape[0])
    library.tf_logsumexp(_PACK(logits.data_ptr(), out.data_ptr(), *logits.shape))
    return out
