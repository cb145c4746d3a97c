"""Executes a plan: one forward pass, one sampling call, one row of the result per chunk.

A step is launched and collected later; nothing between the two waits for the device. Where graphs
were captured a step is replayed from one, unless it is larger than all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tokenfleet.engine.execution.batch import build_inputs
from tokenfleet.engine.execution.buckets import Bucket
from tokenfleet.engine.execution.columns import Columns, Ids, columns_of
from tokenfleet.engine.execution.containment import (
    Containment,
    free_cached_memory,
    is_fatal,
    is_out_of_memory,
)
from tokenfleet.engine.execution.drawing import Drawing, Drawn
from tokenfleet.engine.execution.flight import (
    Flight,
    Listing,
    Note,
    Part,
    StepResult,
    Timing,
    joined,
)
from tokenfleet.engine.execution.graphs import StepGraphs
from tokenfleet.engine.execution.param_table import ParamTable
from tokenfleet.engine.execution.placed_model import PlacedModel
from tokenfleet.engine.execution.prompt_logprobs import wanted
from tokenfleet.engine.execution.sampler import Sampler
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.execution.weights import NewWeights, WeightUpdate
from tokenfleet.engine.scheduling.plan import Chunk, StepPlan
from tokenfleet.kernels.block_copy import copy_blocks
from tokenfleet.kernels.token_pool import scatter_tokens

FaultHook = Callable[[str, list[Chunk], Tensor | None], None]
"""Called at "copy" and "forward" (before them, no tensor) and "hidden" (the result of a forward
pass, which may be changed: a row for each token, in a replayed step one for each chunk)."""


class Runner:
    """Launches and collects steps of a model; owns the rows of the running batch."""

    def __init__(self, model: PlacedModel) -> None:
        self.model = model
        vocab_size = model.decoder.spec.vocab_size
        self.slots = SlotTable(model.num_slots, model.block_size, model.max_len)
        self.params = ParamTable(model.num_slots, vocab_size)
        self.transfers = model.transfers
        self.sampler = Sampler(self.params, self.slots, model.unknown, self.transfers)
        self.drawing = Drawing(
            self.sampler, self.params, model.unknown, self.transfers, model.device
        )
        self.fault_hook: FaultHook | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Begin to compute the plan's chunks.

        Raises:
            RuntimeError: the device is lost (a CUDA error), after which nothing here works.
        """
        flight = Flight([])
        started = time.perf_counter()
        error = self._prepare(plan, flight.timing)
        if error is not None:
            flight.parts.append(Part(plan.work, error=error))
        else:
            contained = Containment(self._attempt, self.model.device)
            flight.parts += contained.launch(plan.work, flight.timing)
        flight.timing.forward_s = time.perf_counter() - started - flight.timing.sample_s
        return flight

    def collect(self, flight: Flight) -> StepResult:
        """Wait for a launched step; rows in its plan's order. The oldest flight comes first.

        Raises:
            RuntimeError: the device is lost.
        """
        return joined([self._landed(part) for part in flight.parts])

    def _landed(self, part: Part) -> tuple[Part, Ids, dict[int, Note]]:
        """What a part made; its tokens are in the slots' table from now on."""
        tokens, notes = part.read()
        if part.columns is not None:
            self.slots.append(part.columns, tokens)
        return part, tokens, notes

    # -- weights and memory ----------------------------------------------------------------

    def prepare_weights(self, weights: NewWeights) -> WeightUpdate:
        """Check new weights for this decoder; see WeightUpdate."""
        return self.model.prepare_weights(weights)

    def sleep(self) -> None:
        """Free what can be made again; see PlacedModel.sleep."""
        self.sampler.forget()
        self.model.sleep()

    def wake(self) -> None:
        """Undo `sleep`.

        Raises:
            ConfigError: the memory is not there; it sleeps on, and it may be tried again.
        """
        self.model.wake()

    # -- inside ----------------------------------------------------------------------------

    def _prepare(self, plan: StepPlan, timing: Timing) -> str | None:
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
                if self.model.graphs is not None:
                    self.model.graphs.tables.update(plan)
                self._copy_blocks(plan.copies)
            except Exception as error:
                if is_fatal(error):
                    raise
                timing.out_of_memory += is_out_of_memory(error)
                free_cached_memory(self.model.device)
                if last_try:
                    return f"{type(error).__name__}: {error}"
            else:
                break
        return None

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        self._fault("copy", [], None)
        pairs = self.transfers.send(np.array(copies, np.int64).T)
        for pool in self.model.pools:
            copy_blocks(pool, pairs[0], pairs[1])

    # -- one forward pass ------------------------------------------------------------------

    def _attempt(self, work: list[Chunk], timing: Timing) -> Part:
        columns = columns_of(work)
        graphs = self.model.graphs
        if graphs is None or self._lists_prompt(work, columns):
            return self._launched(work, columns, timing)
        bucket = graphs.pick(columns)
        if bucket is None:
            return self._launched(work, columns, timing)
        return self._replayed(work, columns, timing, graphs, bucket)

    def _lists_prompt(self, work: list[Chunk], columns: Columns) -> bool:
        """Whether a chunk, of whatever length, predicts prompt tokens that were asked about: that
        takes the hidden state of each of its tokens, and graphs keep those of the last ones."""
        rows = np.flatnonzero(self.params.lists_prompt[columns.slots])
        return any(wanted(work[row]) for row in rows.tolist())

    def _launched(self, work: list[Chunk], columns: Columns, timing: Timing) -> Part:
        """Operation by operation."""
        inputs = build_inputs(columns, self.slots, self.transfers, self.model.newest)
        self._fault("forward", work, None)
        hidden = self.model.forward(inputs)
        self._fault("hidden", work, hidden)
        forward_done = time.perf_counter()
        rows = inputs.last_rows
        ids = None if self.model.newest is None else inputs.token_ids[rows]
        logits_of = self.model.decoder.logits
        drawn = self.drawing(logits_of, columns, hidden[rows], ids)
        drawn.listings.extend(
            self.drawing.of_prompts(logits_of, work, columns, inputs.first_rows, hidden)
        )
        part = self._remembered(work, columns, drawn)
        timing.sample_s += time.perf_counter() - forward_done
        return part

    def _replayed(
        self,
        work: list[Chunk],
        columns: Columns,
        timing: Timing,
        graphs: StepGraphs,
        bucket: Bucket,
    ) -> Part:
        """From graphs, as far as they go."""
        count = len(work)
        graphs.fill(bucket, columns, self.slots, self.params)
        self._fault("forward", work, None)
        graphs.forward(bucket)
        hidden = graphs.hidden[:count]
        self._fault("hidden", work, hidden)
        forward_done = time.perf_counter()
        sampling = columns.slots[columns.samples]
        if not self.params.special[sampling].any():
            graphs.sample(bucket, drawn=not self.params.greedy[sampling].all())
            try:
                # a copy, because the next replay may come before this one's result has left
                part = self._part(work, columns, graphs.verdicts[:count].clone(), [])
            except Exception:  # whatever it was, the step may be tried again
                graphs.unsample(bucket)
                raise
        else:
            ids = graphs.last_ids[:count]
            drawn = self.drawing(self.model.decoder.logits, columns, hidden, ids)
            part = self._remembered(work, columns, drawn)
        timing.sample_s += time.perf_counter() - forward_done
        return part

    def _part(
        self, work: list[Chunk], columns: Columns, verdicts: Tensor, listings: list[Listing]
    ) -> Part:
        tensors = [tensor for listing in listings for tensor in listing.report.tensors]
        arriving = self.transfers.fetch([verdicts, *tensors])
        return Part(work, columns, listings=tuple(listings), arriving=arriving)

    def _remembered(self, work: list[Chunk], columns: Columns, drawn: Drawn) -> Part:
        """The part; its tokens are the newest ones of their slots from now on.

        That comes last: what fails before it is tried again, and reads the tokens that it read.
        """
        part = self._part(work, columns, drawn.verdicts, drawn.listings)
        if self.model.newest is not None and drawn.tokens is not None:
            scatter_tokens(drawn.tokens, self.model.newest, self.transfers.send(drawn.slots))
        return part

    def _fault(self, point: str, work: list[Chunk], tensor: Tensor | None) -> None:
        if self.fault_hook is not None:
            self.fault_hook(point, work, tensor)
