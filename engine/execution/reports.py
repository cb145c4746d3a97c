"""Log probabilities on their way from the device to a caller.

They are looked up on the device, for the few tokens that are listed, and become dictionaries on the
host when the step's result is read; so asking for them does not make a step wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenfleet.engine.request import Logprobs
from tokenfleet.kernels.logsumexp import logsumexp
from tokenfleet.kernels.sampling import best_of


@dataclass(frozen=True, slots=True)
class Report:
    """What is listed for R rows."""

    wanted: NDArray[np.int64]
    """[R]: how many of the best tokens each row asked for."""
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """Chosen ids and their log probabilities [R], the best log probabilities and their ids [R, K].
    """


def look_up(
    logits: Tensor, chosen: Tensor, wanted: NDArray[np.int64], unknown: Tensor | None
) -> Report:
    """List log probabilities of rows of logits fp32 [R, V] (overwritten).

    The chosen token [R] is always in; then the best ones, without ids that the tokenizer does not
    have (`unknown`).
    """
    norm = logsumexp(logits)
    own = logits.gather(1, chosen[:, None])[:, 0] - norm
    most = int(wanted.max())
    if unknown is not None:
        logits.index_fill_(1, unknown, -np.inf)
    best, ids = best_of(logits, most) if most else (logits[:, :0], logits[:, :0].long())
    return Report(wanted, (chosen, own, best - norm[:, None], ids))


def as_dicts(wanted: NDArray[np.int64], tensors: Sequence[Tensor]) -> list[Logprobs]:
    """One dictionary a row, from the tensors of a Report on the host; without impossible tokens."""
    reports: list[Logprobs] = []
    columns = (tensor.tolist() for tensor in tensors)
    for count, token, own, values, names in zip(wanted.tolist(), *columns, strict=True):
        top = zip(names[:count], values[:count], strict=True)
        reports.append({name: value for name, value in top if value > -np.inf} | {token: own})
    return reports
