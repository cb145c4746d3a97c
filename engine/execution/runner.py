"""Executes a plan: one forward pass, one sampling call, one outcome per chunk.

An error in a step costs the chunk that caused it, never the batch: the work is tried again in
halves until it is alone. That is safe because a step only writes KV at positions it owns, and
writes the same again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tokenfleet.engine.execution.batch import StepInputs, build_inputs
from tokenfleet.engine.execution.param_table import ParamTable
from tokenfleet.engine.execution.prompt_logprobs import prompt_logprobs, wanted
from tokenfleet.engine.execution.sampler import Sampled, Sampler
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.request import Logprobs
from tokenfleet.engine.scheduling.plan import Chunk, StepPlan
from tokenfleet.kernels.paged_attention import KVPool

FaultHook = Callable[[str, list[Chunk], Tensor | None], None]
"""Called at "copy" and "forward" (before them, no tensor) and "hidden" (the result of a forward
pass, which may be changed)."""


@dataclass(slots=True)
class Outcome:
    """What came out for one chunk."""

    chunk: Chunk
    token: int = -1
    """The sampled token; -1 when the chunk does not sample."""
    logprobs: Logprobs | None = None
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    error: str | None = None
    """Why its sequence cannot go on; its KV must not be kept."""


@dataclass(slots=True)
class Timing:
    """Where a step's time went, in seconds, and what went wrong in it."""

    forward_s: float = 0.0
    sample_s: float = 0.0
    out_of_memory: int = 0


class Runner:
    """Owns model, KV pools and the running batch's rows.

    Args:
        num_blocks: usable blocks; one more is allocated as the null block.
        known_tokens: ids that may be sampled; None = all.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_len: int,
        known_tokens: Collection[int] | None,
        device: torch.device,
    ) -> None:
        self.decoder = decoder
        self.device = device
        self.pools: list[KVPool] = decoder.make_pools(num_blocks + 1, block_size)
        self.slots = SlotTable(num_slots, block_size, max_len)
        self.params = ParamTable(num_slots, decoder.spec.vocab_size)
        self.unknown = _unknown(decoder.spec.vocab_size, known_tokens, device)
        self.sampler = Sampler(self.params, self.slots, self.unknown)
        self.fault_hook: FaultHook | None = None
        self.timing = Timing()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Outcome]:
        """Compute the plan's chunks; outcomes in the plan's order.

        Raises:
            RuntimeError: the device is lost (a CUDA error), after which nothing here works.
        """
        self.timing = Timing()
        error = self._prepare(plan)
        if error is not None:
            return [Outcome(chunk, error=error) for chunk in plan.work]
        return self._contained(plan.work, tries=2)

    def _prepare(self, plan: StepPlan) -> str | None:
        """Bring rows and shared blocks up to the plan; why the step cannot be, if it cannot.

        Doing it again after a part of it does no harm: copies read blocks that nobody writes to.
        """
        for last_try in (False, True):
            try:
                for sequence in plan.admitted:
                    if sequence.slot >= 0:
                        self.slots.admit(sequence)
                        self.params.admit(sequence)
                for sequence, first in plan.grown:
                    self.slots.update_blocks(sequence, first)
                self._copy_blocks(plan.copies)
            except Exception as error:
                if _is_fatal(error):
                    raise
                self.timing.out_of_memory += is_out_of_memory(error)
                _free_cached_memory(self.device)
                if last_try:
                    return f"{type(error).__name__}: {error}"
            else:
                break
        return None

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        self._fault("copy", [], None)
        pairs = torch.tensor(copies, device=self.device).T
        for pool in self.pools:
            pool.k[pairs[1]] = pool.k[pairs[0]]
            pool.v[pairs[1]] = pool.v[pairs[0]]

    # -- containment -----------------------------------------------------------------------

    def _contained(self, work: list[Chunk], tries: int) -> list[Outcome]:
        try:
            return self._attempt(work)
        except Exception as error:
            if _is_fatal(error):
                raise
            return self._again(work, error, tries)

    def _again(self, work: list[Chunk], error: Exception, tries: int) -> list[Outcome]:
        if is_out_of_memory(error):
            self.timing.out_of_memory += 1
            _free_cached_memory(self.device)
            if tries > 1:
                return self._contained(work, tries - 1)
            if len(work) == 1 and work[0].count > 1:
                return self._in_two_chunks(work[0])
        if len(work) == 1:
            return [Outcome(work[0], error=f"{type(error).__name__}: {error}")]
        middle = len(work) // 2
        return self._contained(work[:middle], 1) + self._contained(work[middle:], 1)

    def _in_two_chunks(self, chunk: Chunk) -> list[Outcome]:
        """The same tokens in two passes of half the size; one outcome for both."""
        half = chunk.count // 2
        head = Chunk(chunk.sequence, chunk.start, half, samples=False)
        tail = Chunk(chunk.sequence, chunk.start + half, chunk.count - half, chunk.samples)
        first = self._contained([head], 1)[0]
        if first.error is not None:
            return [Outcome(chunk, error=first.error)]
        second = self._contained([tail], 1)[0]
        reports = first.prompt_logprobs + second.prompt_logprobs
        return [Outcome(chunk, second.token, second.logprobs, reports, second.error)]

    # -- one forward pass ------------------------------------------------------------------

    def _attempt(self, work: list[Chunk]) -> list[Outcome]:
        started = time.perf_counter()
        inputs = build_inputs(work, self.slots, self.device)
        self._fault("forward", work, None)
        hidden = self.decoder.forward(inputs.token_ids, inputs.attention, self.pools)
        self._fault("hidden", work, hidden)
        last = hidden[inputs.last_rows]
        sound = torch.isfinite(last).all(-1)
        forward_done = time.perf_counter()
        outcomes = [Outcome(chunk) for chunk in work]
        self._sample(outcomes, inputs, last)
        self._report_prompts(outcomes, inputs, hidden)
        for bad in np.flatnonzero(~sound.cpu().numpy()).tolist():
            outcomes[bad] = _poisoned(outcomes[bad].chunk)
        self.timing.forward_s += forward_done - started
        self.timing.sample_s += time.perf_counter() - forward_done
        return outcomes

    def _sample(self, outcomes: list[Outcome], inputs: StepInputs, last: Tensor) -> None:
        """Draw a token for each chunk that reached its sequence's end."""
        picks = [i for i, outcome in enumerate(outcomes) if outcome.chunk.samples]
        if not picks:
            return
        index = np.array(picks, np.int64)
        rows = last if len(picks) == len(outcomes) else last[index]
        slots, ends = inputs.slots[index], inputs.ends[index]
        sampled: Sampled = self.sampler(self.decoder.logits(rows), slots, ends)
        self.slots.append(slots, ends, sampled.tokens)
        for j, (i, token) in enumerate(zip(picks, sampled.tokens.tolist(), strict=True)):
            outcomes[i].token = token
            if sampled.logprobs is not None:
                outcomes[i].logprobs = sampled.logprobs[j]
        for bad in np.flatnonzero(sampled.poisoned).tolist():
            outcomes[picks[bad]] = _poisoned(outcomes[picks[bad]].chunk)

    def _report_prompts(self, outcomes: list[Outcome], inputs: StepInputs, hidden: Tensor) -> None:
        for i, outcome in enumerate(outcomes):
            count = wanted(outcome.chunk)
            if count and outcome.error is None:
                first = int(inputs.attention.query_starts[i])
                rows = hidden[first : first + count]
                found = prompt_logprobs(outcome.chunk, rows, self.decoder.logits, self.unknown)
                outcome.prompt_logprobs = found

    def _fault(self, point: str, work: list[Chunk], tensor: Tensor | None) -> None:
        if self.fault_hook is not None:
            self.fault_hook(point, work, tensor)


def _unknown(vocab_size: int, known: Collection[int] | None, device: torch.device) -> Tensor | None:
    """Ids of the model that the tokenizer does not have, int64; None when it has all."""
    if known is None:
        return None
    missing = sorted(set(range(vocab_size)).difference(known))
    return torch.tensor(missing, device=device) if missing else None


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device or the host ran out of memory in an allocation."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _is_fatal(error: Exception) -> bool:
    """A CUDA error other than out-of-memory leaves the context unusable: only a restart helps."""
    lost = isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)
    return lost and not is_out_of_memory(error)


def _free_cached_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _poisoned(chunk: Chunk) -> Outcome:
    return Outcome(chunk, error="the model produced NaN or infinite values for this sequence")
