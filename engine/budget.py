"""The token budget of a step while memory is short: less work a step, and more again later.

Invariant: never above what the engine was configured with, never below a token for each slot.
"""

from __future__ import annotations

from dataclasses import replace

from tokenfleet.engine.scheduling.limits import Limits

CLEAN_STEPS = 100
"""Steps without an out-of-memory after which a lowered budget is doubled again."""


class Budget:
    """Adapts the limits to what the device's memory allows."""

    def __init__(self, limits: Limits) -> None:
        self._configured = limits
        self._clean_steps = 0
        self.limits = limits
        """Those of the next step."""

    def after_step(self, out_of_memory: int) -> None:
        """Halve the budget when memory ran out in a step, double it back when it does not."""
        now = self.limits.max_num_batched_tokens
        if out_of_memory:
            self._clean_steps = 0
            self._set(max(self._configured.max_num_seqs, now // 2))
        elif now < self._configured.max_num_batched_tokens:
            self._clean_steps += 1
            if self._clean_steps % CLEAN_STEPS == 0:
                self._set(min(2 * now, self._configured.max_num_batched_tokens))

    def _set(self, tokens: int) -> None:
        self.limits = replace(self._configured, max_num_batched_tokens=tokens)
