"""Executes a plan: one forward pass, one sampling call, one row of the result per chunk.

A step is launched and collected later; nothing between the two waits for the device. Where graphs
were captured a step is replayed from one, unless it is larger than all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from tokenfleet.engine.execution.batch import StepInputs, build_inputs
from tokenfleet.engine.execution.buckets import Bucket
from tokenfleet.engine.execution.capture import Capture
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
from tokenfleet.engine.execution.graphs import DeviceTables, StepGraphs
from tokenfleet.engine.execution.memory import MemoryProbe, check_free, refusing
from tokenfleet.engine.execution.param_table import ParamTable
from tokenfleet.engine.execution.programs import MOST_RECORDED, DecodePrograms
from tokenfleet.engine.execution.sampler import Sampler
from tokenfleet.engine.execution.slots import SlotTable
from tokenfleet.engine.execution.transfers import transfers_for
from tokenfleet.engine.execution.weights import NewWeights, WeightUpdate, moved, num_bytes
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.scheduling.plan import Chunk, StepPlan
from tokenfleet.kernels.block_copy import copy_blocks
from tokenfleet.kernels.paged_attention import KVPool
from tokenfleet.kernels.token_pool import scatter_tokens

FaultHook = Callable[[str, list[Chunk], Tensor | None], None]
"""Called at "copy" and "forward" (before them, no tensor) and "hidden" (the result of a forward
pass, which may be changed: a row for each token, in a replayed step one for each chunk)."""


class Runner:
    """Owns model, KV pools and the running batch's rows.

    Args:
        num_blocks: usable blocks; one more is allocated as the null block.
        known_tokens: ids that may be sampled; None = all.
        ahead: whether a step may be launched before the one before it is collected.
        capture: what steps are captured with; None = every step is launched.
        buckets: the steps to capture.
        quantization: of weights that come later, as the decoder's own.
        probe: of the device's memory, asked before waking; None = it is not asked.
        record: whether decode steps on a CPU become programs, where they can.
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
        ahead: bool = False,
        capture: Capture | None = None,
        buckets: Items[Bucket] = (),
        quantization: str | None = None,
        probe: MemoryProbe | None = None,
        record: bool = False,
    ) -> None:
        self.decoder = decoder
        self.device = device
        self.pools: list[KVPool] = decoder.make_pools(num_blocks + 1, block_size)
        self._num_blocks = num_blocks
        self.slots = SlotTable(num_slots, block_size, max_len)
        self.params = ParamTable(num_slots, decoder.spec.vocab_size)
        self.unknown = _unknown(decoder.spec.vocab_size, known_tokens, device)
        self.transfers = transfers_for(device)
        self.sampler = Sampler(self.params, self.slots, self.unknown, self.transfers)
        self.drawing = Drawing(self.sampler, self.params, self.unknown, self.transfers, device)
        self.newest: Tensor | None = None
        """int64 [slots + 1]: the token sampled last for each, for steps launched before the host
        knows it. The last row is spare."""
        if ahead or capture is not None:
            self.newest = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.graphs: StepGraphs | None = None
        self.fault_hook: FaultHook | None = None
        self._max_len = max_len
        self._capture, self._buckets = capture, buckets
        self._quantization, self._probe = quantization, probe
        self._record = record and device.type == "cpu"
        self.programs: DecodePrograms | None = None
        self._make_graphs()
        self._make_programs()

    @torch.inference_mode()
    def _make_graphs(self) -> None:
        if self._capture is None or self.newest is None or not self._buckets:
            return
        max_blocks = -(-self._max_len // self.slots.block_size)
        num_slots = self.newest.shape[0] - 1
        self.graphs = StepGraphs(
            self.decoder,
            self.pools,
            self._buckets,
            tables=DeviceTables(num_slots, max_blocks, self.transfers, self.device),
            newest=self.newest,
            unknown=self.unknown,
            max_len=self._max_len,
            transfers=self.transfers,
            capture=self._capture,
        )

    def _make_programs(self) -> None:
        if not self._record:
            return
        self.programs = DecodePrograms(
            self.decoder,
            self.pools,
            most=min(len(self.slots.tokens), MOST_RECORDED),
            max_blocks=-(-self._max_len // self.slots.block_size),
        )

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
            contained = Containment(self._attempt, self.device)
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
        return WeightUpdate(self.decoder, weights, self._quantization)

    def sleep(self) -> None:
        """Free KV blocks and graphs; on CUDA the weights wait in the host's memory."""
        self.graphs = self.programs = None
        self.pools = []
        self.sampler.forget()
        if self.device.type == "cuda":
            self.decoder = moved(self.decoder, lambda tensor: tensor.cpu())
            free_cached_memory(self.device)

    def wake(self) -> None:
        """Undo `sleep`. Graphs are captured anew: the addresses are others.

        Raises:
            ConfigError: the memory is not there. What was taken went back, and it may be tried
                again.
        """
        size = self.slots.block_size
        if self._probe is not None:
            needed = (self._num_blocks + 1) * self.decoder.kv_bytes_per_block(size)
            needed += num_bytes(self.decoder)
            check_free(self._probe, needed)
        try:
            with refusing("weights and KV blocks were made again"):
                if self.decoder.device.type != self.device.type:
                    self.decoder = moved(self.decoder, lambda tensor: tensor.to(self.device))
                self.pools = self.decoder.make_pools(self._num_blocks + 1, size)
                self._make_graphs()
                self._make_programs()
        except BaseException:
            self.sleep()
            raise

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
                if self.graphs is not None:
                    self.graphs.tables.update(plan)
                self._copy_blocks(plan.copies)
            except Exception as error:
                if is_fatal(error):
                    raise
                timing.out_of_memory += is_out_of_memory(error)
                free_cached_memory(self.device)
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
        for pool in self.pools:
            copy_blocks(pool, pairs[0], pairs[1])

    # -- one forward pass ------------------------------------------------------------------

    def _attempt(self, work: list[Chunk], timing: Timing) -> Part:
        columns = columns_of(work)
        bucket = self.graphs.pick(work, columns) if self.graphs is not None else None
        if self.graphs is None or bucket is None:
            return self._launched(work, columns, timing)
        return self._replayed(work, columns, timing, self.graphs, bucket)

    def _launched(self, work: list[Chunk], columns: Columns, timing: Timing) -> Part:
        """Operation by operation."""
        inputs = build_inputs(columns, self.slots, self.transfers, self.newest)
        self._fault("forward", work, None)
        hidden = self._forward(inputs)
        self._fault("hidden", work, hidden)
        forward_done = time.perf_counter()
        rows = inputs.last_rows
        ids = None if self.newest is None else inputs.token_ids[rows]
        logits_of = self.decoder.logits
        drawn = self.drawing(logits_of, columns, hidden[rows], ids)
        drawn.listings.extend(
            self.drawing.of_prompts(logits_of, work, columns, inputs.first_rows, hidden)
        )
        part = self._remembered(work, columns, drawn)
        timing.sample_s += time.perf_counter() - forward_done
        return part

    def _forward(self, inputs: StepInputs) -> Tensor:
        if self.programs is not None:
            hidden = self.programs.forward(inputs.token_ids, inputs.attention)
            if hidden is not None:
                return hidden
        return self.decoder.forward(inputs.token_ids, inputs.attention, self.pools)

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
            drawn = self.drawing(self.decoder.logits, columns, hidden, ids)
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
        if self.newest is not None and drawn.tokens is not None:
            scatter_tokens(drawn.tokens, self.newest, self.transfers.send(drawn.slots))
        return part

    def _fault(self, point: str, work: list[Chunk], tensor: Tensor | None) -> None:
        if self.fault_hook is not None:
            self.fault_hook(point, work, tensor)


def _unknown(vocab_size: int, known: Collection[int] | None, device: torch.device) -> Tensor | None:
    """Ids of the model that the tokenizer does not have, int64; None when it has all."""
    if known is None:
        return None
    missing = sorted(set(range(vocab_size)).difference(known))
    return torch.tensor(missing, device=device) if missing else None
