"""An engine whose steps last a fixed time and whose output repeats the prompt: no model, no torch.

It keeps the contract of EngineCore as far as the worker sees it, so that a fleet can be measured
and broken on a small machine. The tokens depend on the prompt and the position only: a resumed
job goes on exactly where it was.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.request import CoreEvent, EngineRequest
from tokenfleet.engine.stats import StepStats

DEFAULT_MODEL_LEN = 8192


@dataclass(slots=True)
class _Sequence:
    request: EngineRequest
    choice: int
    made: int
    """Output tokens so far, those of earlier attempts included."""
    limit: int

    def next_token(self) -> int:
        prompt = self.request.prompt_token_ids
        self.made += 1
        return prompt[(self.made - 1 + self.choice) % len(prompt)]


@dataclass(slots=True)
class SimulatedCore:
    """Runs up to `max_num_seqs` sequences; each step gives every one of them one token."""

    config: EngineConfig
    step_s: float
    sleep: Callable[[float], None] = time.sleep
    stats: StepStats = field(default_factory=StepStats)
    _running: list[_Sequence] = field(default_factory=list)
    _waiting: list[_Sequence] = field(default_factory=list)
    _cancelled: list[CoreEvent] = field(default_factory=list)

    @property
    def max_len(self) -> int:
        """Longest prompt plus output."""
        return self.config.max_model_len or DEFAULT_MODEL_LEN

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting or self._cancelled)

    @property
    def free_slots(self) -> int:
        """Slots that no sequence holds or waits for."""
        return max(0, self.config.max_num_seqs - len(self._running) - len(self._waiting))

    def prepare_grammars(self) -> None:
        """There are none."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request; it runs from the next step on.

        Raises:
            InvalidRequest: the prompt is empty or too long.
        """
        length = len(request.prompt_token_ids)
        if length == 0:
            raise InvalidRequest("empty_prompt", "the prompt has no tokens; send at least one")
        if length >= self.max_len:
            raise InvalidRequest(
                "prompt_too_long",
                f"the prompt has {length} tokens; this model takes at most "
                f"{self.max_len - 1} and one to answer",
            )
        room = self.max_len - length
        limit = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        for choice in range(request.params.n):
            if choice not in request.ended:
                made = len(request.resume[choice]) if choice < len(request.resume) else 0
                sequence = _Sequence(request, choice, made, limit)
                insort(self._waiting, sequence, key=lambda one: one.request.priority)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request, or one of its choices; nothing happens when it is not there."""
        for queue in (self._running, self._waiting):
            for sequence in [s for s in queue if s.request.id == request_id]:
                if choice is None or sequence.choice == choice:
                    queue.remove(sequence)
                    self._cancelled.append(CoreEvent(request_id, sequence.choice, [], "cancelled"))

    def step(self) -> list[CoreEvent]:
        """One token for each running sequence, after the fixed time."""
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            self._running.append(self._waiting.pop(0))
        if self._running:
            self.sleep(self.step_s)
        events, self._cancelled = self._cancelled, []
        events += [self._advance(sequence) for sequence in self._running]
        self._count(len(self._running))
        self._running = [s for s in self._running if s.made < s.limit]
        return events

    def _advance(self, sequence: _Sequence) -> CoreEvent:
        tokens = [sequence.next_token()] if sequence.made < sequence.limit else []
        reason = "length" if sequence.made >= sequence.limit else None
        return CoreEvent(sequence.request.id, sequence.choice, tokens, reason)

    def _count(self, tokens: int) -> None:
        self.stats.step += 1
        self.stats.running = tokens
        self.stats.waiting = len(self._waiting)
        self.stats.scheduled_tokens = self.stats.decode_tokens = tokens
        self.stats.decode_tokens_total += tokens
        self.stats.step_s = self.step_s
        self.stats.step_s_total += self.step_s

    def audit(self) -> None:
        """Nothing is shared here that could be counted wrongly."""
