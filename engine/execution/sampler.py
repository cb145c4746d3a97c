"""Chooses one token for each row of logits, all rows together.

Order: bias and minimum length, penalties, grammar, then temperature, top-k, top-p, min-p and the
draw. A row that is greedy and asks for nothing costs one argmax. A row with a NaN or an infinite
logit is reported as poisoned; what it drew means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenfleet.engine.constraints import allowed_tokens
from tokenfleet.engine.execution.param_table import Ids, ParamTable, Scattered
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.request import Logprobs
from tokenfleet.kernels.rng import row_keys
from tokenfleet.kernels.sampling import (
    PenaltyRows,
    SamplingRows,
    best_of,
    greedy,
    penalise,
    sample,
    warp,
)

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's choices for R rows."""

    tokens: Ids
    poisoned: Mask
    logprobs: list[Logprobs | None] | None
    """Per row, None where it did not ask; None when no row did."""


class Sampler:
    """Applies the parameters of the slots to logits.

    Args:
        unknown: ids int64 that the tokenizer does not have; they are never chosen nor listed.
    """

    def __init__(self, params: ParamTable, slots: SlotTable, unknown: Tensor | None) -> None:
        self._params = params
        self._slots = slots
        self._unknown = unknown

    def __call__(self, logits: Tensor, slots: Ids, ends: Ids) -> Sampled:
        """Sample from logits fp32 [R, V] (overwritten) for sequences of `ends` [R] tokens."""
        p = self._params
        raw_rows = np.flatnonzero((p.logprobs[slots] >= 0) & ~p.processed[slots])
        raw = _picked(logits, raw_rows).log_softmax(-1) if raw_rows.size else None
        if self._unknown is not None:
            logits.index_fill_(1, self._unknown, -torch.inf)
        poisoned = ~torch.isfinite(logits.amax(-1))
        self._adjust(logits, slots, ends)
        if p.penalised[slots].any():
            self._penalise(logits, slots, ends)
        self._constrain(logits, slots)
        tokens = self._choose(logits, slots, ends)
        chosen = tokens.cpu().numpy()
        reports = self._reports(logits, chosen, slots, ends, raw_rows, raw)
        return Sampled(chosen, poisoned.cpu().numpy(), reports)

    def _choose(self, logits: Tensor, slots: Ids, ends: Ids) -> Tensor:
        """The best token of greedy rows, a drawn one of the others."""
        drawn = np.flatnonzero(~self._params.greedy[slots])
        if not drawn.size:
            return greedy(logits)[1]
        found = sample(_picked(logits, drawn), self._rows(slots[drawn], ends[drawn], logits.device))
        if drawn.size == len(slots):
            return found
        tokens = greedy(logits)[1]
        tokens[drawn] = found
        return tokens

    def _rows(self, slots: Ids, ends: Ids, device: torch.device) -> SamplingRows:
        p = self._params
        keys = row_keys(p.seed[slots], p.choice[slots], ends - p.num_prompt[slots])
        return SamplingRows(
            torch.from_numpy(p.temperature[slots]).to(device),
            torch.from_numpy(p.top_k[slots]).to(device),
            torch.from_numpy(p.top_p[slots]).to(device),
            torch.from_numpy(p.min_p[slots]).to(device),
            torch.from_numpy(keys).to(device),
            filtered=bool(p.filtered[slots].any()),
        )

    def _adjust(self, logits: Tensor, slots: Ids, ends: Ids) -> None:
        """Bias and minimum length, for all rows in two scattered writes."""
        p = self._params
        if not p.adjusted[slots].any():
            return
        bias, ending = p.scattered(slots)
        if bias.rows.size:
            values = torch.from_numpy(bias.values).to(logits.device)
            logits.index_put_(_places(bias, logits), values, accumulate=True)
        short = (ends - p.num_prompt[slots] < p.min_tokens[slots])[ending.rows]
        if short.any():
            below = torch.tensor(-torch.inf, device=logits.device)
            logits.index_put_(_places(ending.where(short), logits), below)

    def _penalise(self, logits: Tensor, slots: Ids, ends: Ids) -> None:
        p = self._params
        rows = np.flatnonzero(p.penalised[slots])
        where, lengths = slots[rows], ends[rows]
        history = self._slots.tokens[where, : int(lengths.max())].astype(np.int64)
        device = logits.device
        histories = PenaltyRows(
            torch.from_numpy(history).to(device),
            torch.from_numpy(p.num_prompt[where]).to(device),
            torch.from_numpy(lengths).to(device),
            torch.from_numpy(p.presence[where]).to(device),
            torch.from_numpy(p.frequency[where]).to(device),
            torch.from_numpy(p.repetition[where]).to(device),
        )
        picked = _picked(logits, rows)
        penalised = penalise(picked, histories)
        if penalised is not logits:
            logits[rows] = penalised

    def _constrain(self, logits: Tensor, slots: Ids) -> None:
        """Forbid what the rows' grammars do not allow."""
        p = self._params
        rows = np.flatnonzero(p.constrained[slots])
        if not rows.size:
            return
        constraints = [p.constraint[slot] for slot in slots[rows].tolist()]
        allowed = torch.from_numpy(allowed_tokens(constraints, logits.shape[1])).to(logits.device)
        where = torch.from_numpy(rows).to(logits.device)
        if len(rows) == logits.shape[0]:
            logits.masked_fill_(~allowed, -torch.inf)
        else:
            logits[where] = logits[where].masked_fill_(~allowed, -torch.inf)

    def _reports(
        self, logits: Tensor, tokens: Ids, slots: Ids, ends: Ids, raw_rows: Ids, raw: Tensor | None
    ) -> list[Logprobs | None] | None:
        p = self._params
        wanted = p.logprobs[slots]
        processed_rows = np.flatnonzero((wanted >= 0) & p.processed[slots])
        if raw is None and not processed_rows.size:
            return None
        reports: list[Logprobs | None] = [None] * len(slots)
        if raw is not None:
            fill_reports(reports, raw, raw_rows, tokens, wanted, self._unknown)
        if processed_rows.size:
            final = self._processed(logits, slots, ends, processed_rows)
            fill_reports(reports, final, processed_rows, tokens, wanted, None)
        return reports

    def _processed(self, logits: Tensor, slots: Ids, ends: Ids, rows: Ids) -> Tensor:
        """Log probabilities after every filter; a greedy row's are those before the argmax."""
        final = _picked(logits, rows).clone()
        drawn = np.flatnonzero(~self._params.greedy[slots[rows]])
        if drawn.size:
            params = self._rows(slots[rows[drawn]], ends[rows[drawn]], logits.device)
            final[drawn] = warp(final[drawn], params)
        return final.log_softmax(-1)


def fill_reports(
    reports: list[Logprobs | None],
    logprobs: Tensor,
    rows: Ids,
    tokens: Ids,
    wanted: Ids,
    unknown: Tensor | None,
) -> None:
    """Set reports[row] for each of `rows`, whose log probabilities [len(rows), V] are given.

    The chosen token is always in; then the `wanted[row]` best ones, without impossible ones and
    without ids that the tokenizer does not have.
    """
    chosen = torch.from_numpy(tokens[rows]).to(logprobs.device)[:, None]
    own = logprobs.gather(1, chosen)[:, 0].tolist()
    most = int(wanted[rows].max())
    if unknown is not None:
        logprobs.index_fill_(1, unknown, -torch.inf)
    best, ids = best_of(logprobs, most) if most else (logprobs[:, :0], logprobs[:, :0].long())
    for i, (values, names) in enumerate(zip(best.tolist(), ids.tolist(), strict=True)):
        row = rows[i]
        top = zip(names[: wanted[row]], values[: wanted[row]], strict=True)
        report = {name: value for name, value in top if value > -np.inf}
        report[int(tokens[row])] = own[i]
        reports[row] = report


def _picked(logits: Tensor, rows: Ids) -> Tensor:
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _places(entries: Scattered, logits: Tensor) -> tuple[Tensor, Tensor]:
    device = logits.device
    return torch.from_numpy(entries.rows).to(device), torch.from_numpy(entries.ids).to(device)
