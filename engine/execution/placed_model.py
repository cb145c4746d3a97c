"""A decoder in a device's memory, with all that holds addresses of it.

KV pools, graphs and programs name the memory of weights and blocks: they are made together, given
up together by `sleep`, and made again by `wake`. Nothing else keeps a graph or a pool.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from tokenfleet.engine.execution.batch import StepInputs
from tokenfleet.engine.execution.buckets import Bucket
from tokenfleet.engine.execution.capture import Capture
from tokenfleet.engine.execution.containment import free_cached_memory
from tokenfleet.engine.execution.graphs import DeviceTables, StepGraphs
from tokenfleet.engine.execution.memory import MemoryProbe, check_free, refusing
from tokenfleet.engine.execution.programs import StepPrograms
from tokenfleet.engine.execution.transfers import transfers_for
from tokenfleet.engine.execution.weights import NewWeights, WeightUpdate, moved, num_bytes
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.kernels.paged_attention import KVPool


class PlacedModel:
    """Owns the decoder, its KV pools, and what was captured or recorded over them.

    Args:
        num_blocks: usable blocks; one more is allocated as the null block.
        known_tokens: ids that may be sampled; None = all.
        ahead: whether a step may be launched before the one before it is collected.
        capture: what steps are captured with; None = every step is launched.
        buckets: the steps to capture.
        quantization: of weights that come later, as the decoder's own.
        probe: of the device's memory, asked before waking; None = it is not asked.
        record: whether steps on a CPU become programs, where they can.
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
        self.num_slots, self.block_size, self.max_len = num_slots, block_size, max_len
        self._num_blocks = num_blocks
        self.transfers = transfers_for(device)
        self.unknown = _unknown(decoder.spec.vocab_size, known_tokens, device)
        """int64: ids of the model that the tokenizer does not have; None when it has all."""
        self.newest: Tensor | None = None
        """int64 [slots + 1]: the token sampled last for each, for steps launched before the host
        knows it. The last row is spare."""
        if ahead or capture is not None:
            self.newest = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.pools: list[KVPool] = []
        """One a layer; none while it sleeps."""
        self.graphs: StepGraphs | None = None
        self.programs: StepPrograms | None = None
        self._capture, self._buckets = capture, buckets
        self._quantization, self._probe = quantization, probe
        self._record = record and device.type == "cpu"
        self._make()

    def forward(self, inputs: StepInputs) -> Tensor:
        """The hidden state [T, hidden size] of each token; its KV is written."""
        if self.programs is not None:
            hidden = self.programs.forward(inputs.token_ids, inputs.attention)
            if hidden is not None:
                return hidden
        return self.decoder.forward(inputs.token_ids, inputs.attention, self.pools)

    def prepare_weights(self, weights: NewWeights) -> WeightUpdate:
        """Check new weights for this decoder; see WeightUpdate."""
        return WeightUpdate(self.decoder, weights, self._quantization)

    def sleep(self) -> None:
        """Free KV blocks and graphs; on CUDA the weights wait in the host's memory."""
        self.graphs = self.programs = None
        self.pools = []
        if self.device.type == "cuda":
            self.decoder = moved(self.decoder, lambda tensor: tensor.cpu())
            free_cached_memory(self.device)

    def wake(self) -> None:
        """Undo `sleep`. Graphs are captured anew: the addresses are others.

        Raises:
            ConfigError: the memory is not there. What was taken went back, and it may be tried
                again.
        """
        if self._probe is not None:
            needed = (self._num_blocks + 1) * self.decoder.kv_bytes_per_block(self.block_size)
            check_free(self._probe, needed + num_bytes(self.decoder))
        try:
            with refusing("weights and KV blocks were made again"):
                if self.decoder.device.type != self.device.type:
                    self.decoder = moved(self.decoder, lambda tensor: tensor.to(self.device))
                self._make()
        except BaseException:
            self.sleep()
            raise

    def _make(self) -> None:
        """KV pools, and what is captured or recorded over them."""
        self.pools = self.decoder.make_pools(self._num_blocks + 1, self.block_size)
        max_blocks = -(-self.max_len // self.block_size)
        if self._capture is not None and self.newest is not None and self._buckets:
            self.graphs = self._captured(self._capture, self.newest, max_blocks)
        if self._record:
            self.programs = StepPrograms(
                self.decoder, self.pools, num_slots=self.num_slots, max_blocks=max_blocks
            )

    @torch.inference_mode()
    def _captured(self, capture: Capture, newest: Tensor, max_blocks: int) -> StepGraphs:
        return StepGraphs(
            self.decoder,
            self.pools,
            self._buckets,
            tables=DeviceTables(self.num_slots, max_blocks, self.transfers, self.device),
            newest=newest,
            unknown=self.unknown,
            max_len=self.max_len,
            transfers=self.transfers,
            capture=capture,
        )


def _unknown(vocab_size: int, known: Collection[int] | None, device: torch.device) -> Tensor | None:
    if known is None:
        return None
    missing = sorted(set(range(vocab_size)).difference(known))
    return torch.tensor(missing, device=device) if missing else None
