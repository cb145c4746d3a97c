"""Chooses one token for each row of logits, all rows together.

Order: allowed tokens and bad words, bias and minimum length, penalties, grammar, then temperature,
top-k, top-p, min-p and the draw. A row that is greedy and asks for nothing costs one argmax. A row
with a NaN or an infinite logit is reported as poisoned, one whose parameters leave it no token as
stuck; what these drew means nothing. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenfleet.engine.constraints import allowed_words
from tokenfleet.engine.execution.columns import Ids
from tokenfleet.engine.execution.param_table import ParamTable, Scattered
from tokenfleet.engine.execution.reports import Report, look_up
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.execution.transfers import Transfers
from tokenfleet.kernels.sampling import (
    PenaltyRows,
    SamplingRows,
    greedy,
    penalise,
    sample,
    warp,
)
from tokenfleet.kernels.token_mask import allow_only


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's choices for R rows."""

    tokens: Tensor
    """int64 [R]."""
    poisoned: Tensor
    """bool [R]: the model broke."""
    stuck: Tensor | None
    """bool [R]: every token is forbidden; None: none was, in any row."""
    reports: list[tuple[Ids, Report]]
    """Rows that asked for log probabilities, and what is listed for them."""


class Sampler:
    """Applies the parameters of the slots to logits.

    Args:
        unknown: ids int64 that the tokenizer does not have; they are never chosen nor listed.
    """

    def __init__(
        self, params: ParamTable, slots: SlotTable, unknown: Tensor | None, transfers: Transfers
    ) -> None:
        self._params = params
        self._slots = slots
        self._unknown = unknown
        self._send = transfers.send
        self._spare: Tensor | None = None
        """Memory for raw logits: fresh pages for them would cost more than writing them."""

    def __call__(self, logits: Tensor, slots: Ids, ends: Ids, newest: Tensor | None) -> Sampled:
        """Sample from logits fp32 [R, V] (overwritten) for sequences of `ends` [R] tokens, of which
        `newest` int64 [R] are the last ones (None: the slots' tables have them)."""
        p = self._params
        raw_rows = np.flatnonzero((p.logprobs[slots] >= 0) & ~p.processed[slots])
        raw = self._kept(logits, raw_rows) if raw_rows.size else None
        if self._unknown is not None:
            logits.index_fill_(1, self._unknown, -torch.inf)
        if self._plain(slots):
            best, tokens = greedy(logits)  # one pass tells both
            reports = self._reports(logits, tokens, slots, ends, raw_rows, raw)
            return Sampled(tokens, ~torch.isfinite(best), None, reports)
        poisoned = ~torch.isfinite(logits.amax(-1))
        self._limit(logits, slots, ends)
        self._adjust(logits, slots, ends)
        if p.penalised[slots].any():
            self._penalise(logits, slots, ends, newest)
        self._constrain(logits, slots)
        tokens = self._choose(logits, slots, ends)
        stuck = logits.gather(1, tokens[:, None])[:, 0] == -torch.inf  # then it is so for all
        reports = self._reports(logits, tokens, slots, ends, raw_rows, raw)
        return Sampled(tokens, poisoned, stuck, reports)

    def forget(self) -> None:
        """Free what is kept between calls."""
        self._spare = None

    def _plain(self, slots: Ids) -> bool:
        """Whether all rows take the best token of what the model said."""
        p = self._params
        changed = p.adjusted[slots] | p.penalised[slots] | p.constrained[slots] | p.limited[slots]
        return bool((p.greedy[slots] & ~changed).all())

    def _choose(self, logits: Tensor, slots: Ids, ends: Ids) -> Tensor:
        """The best token of greedy rows, a drawn one of the others."""
        drawn = np.flatnonzero(~self._params.greedy[slots])
        if not drawn.size:
            return greedy(logits)[1]
        found = sample(self._picked(logits, drawn), self._rows(slots[drawn], ends[drawn]))
        if drawn.size == len(slots):
            return found
        tokens = greedy(logits)[1]
        tokens[self._send(drawn)] = found
        return tokens

    def _rows(self, slots: Ids, ends: Ids) -> SamplingRows:
        p, send = self._params, self._send
        return SamplingRows(
            send(p.temperature[slots]),
            send(p.top_k[slots]),
            send(p.top_p[slots]),
            send(p.min_p[slots]),
            send(p.keys(slots, ends)),
            filtered=bool(p.filtered[slots].any()),
        )

    def _limit(self, logits: Tensor, slots: Ids, ends: Ids) -> None:
        """Leave some rows nothing but their allowed tokens, and none that completes a bad word."""
        p = self._params
        if not p.limited[slots].any():
            return
        allowed = p.allowed(slots)
        if allowed.rows.size:
            places = self._places(allowed)
            kept = logits[places]
            logits.index_fill_(0, self._send(np.unique(allowed.rows)), -torch.inf)
            logits.index_put_(places, kept)
        self._forbid(logits, p.forbidden(slots, ends, self._slots.tokens))

    def _forbid(self, logits: Tensor, entries: Scattered) -> None:
        if entries.rows.size:
            below = torch.full((), -torch.inf, device=logits.device)
            logits.index_put_(self._places(entries), below)

    def _adjust(self, logits: Tensor, slots: Ids, ends: Ids) -> None:
        """Bias and minimum length, for all rows in two scattered writes."""
        p = self._params
        if not p.adjusted[slots].any():
            return
        bias, ending = p.scattered(slots)
        if bias.rows.size:
            logits.index_put_(self._places(bias), self._send(bias.values), accumulate=True)
        short = (ends - p.num_prompt[slots] < p.min_tokens[slots])[ending.rows]
        self._forbid(logits, ending.where(short))

    def _penalise(self, logits: Tensor, slots: Ids, ends: Ids, newest: Tensor | None) -> None:
        p, send = self._params, self._send
        rows = np.flatnonzero(p.penalised[slots])
        where, lengths = slots[rows], ends[rows]
        longest = int(lengths.max())
        self._slots.make_room(longest)
        history = send(self._slots.tokens[where, :longest]).long()  # half the bytes on their way
        if newest is not None:  # the last token may be one that only the device knows
            history.scatter_(1, send(lengths[:, None] - 1), self._picked(newest, rows)[:, None])
        histories = PenaltyRows(
            history,
            send(p.num_prompt[where]),
            send(lengths),
            send(p.presence[where]),
            send(p.frequency[where]),
            send(p.repetition[where]),
        )
        picked = self._picked(logits, rows)
        penalised = penalise(picked, histories)
        if penalised is not logits:
            logits[send(rows)] = penalised

    def _constrain(self, logits: Tensor, slots: Ids) -> None:
        """Forbid what the rows' grammars do not allow."""
        p = self._params
        rows = np.flatnonzero(p.constrained[slots])
        if not rows.size:
            return
        constraints = [p.constraint[slot] for slot in slots[rows].tolist()]
        allow_only(logits, self._send(rows), self._send(allowed_words(constraints)))

    def _reports(
        self,
        logits: Tensor,
        tokens: Tensor,
        slots: Ids,
        ends: Ids,
        raw_rows: Ids,
        raw: Tensor | None,
    ) -> list[tuple[Ids, Report]]:
        p = self._params
        wanted = p.logprobs[slots]
        found = []
        if raw is not None:
            chosen = self._picked(tokens, raw_rows)
            found.append((raw_rows, look_up(raw, chosen, wanted[raw_rows], self._unknown)))
        rows = np.flatnonzero((wanted >= 0) & p.processed[slots])
        if rows.size:
            final = self._processed(logits, slots, ends, rows)
            found.append((rows, look_up(final, self._picked(tokens, rows), wanted[rows], None)))
        return found

    def _processed(self, logits: Tensor, slots: Ids, ends: Ids, rows: Ids) -> Tensor:
        """Logits after every filter; a greedy row's are those before the argmax."""
        final = self._picked(logits, rows).clone()
        drawn = np.flatnonzero(~self._params.greedy[slots[rows]])
        if drawn.size:
            params = self._rows(slots[rows[drawn]], ends[rows[drawn]])
            where = self._send(drawn)
            final[where] = warp(final[where], params)
        return final

    def _kept(self, logits: Tensor, rows: Ids) -> Tensor:
        """A copy of some rows as the model made them, until the next call."""
        if self._spare is None or self._spare.shape[0] < len(rows):
            self._spare = torch.empty_like(logits)
        kept = self._spare[: len(rows)]
        if len(rows) == logits.shape[0]:
            return kept.copy_(logits)
        return torch.index_select(logits, 0, self._send(rows), out=kept)

    def _picked(self, values: Tensor, rows: Ids) -> Tensor:
        """Some rows of [R, ...]; the tensor itself where they are all."""
        return values if len(rows) == values.shape[0] else values[self._send(rows)]

    def _places(self, entries: Scattered) -> tuple[Tensor, Tensor]:
        return self._send(entries.rows), self._send(entries.ids)
