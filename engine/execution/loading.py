"""From a config to a model that can run steps."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import CheckpointError, InvalidRequest
from tokenfleet.engine.execution.buckets import Bucket, decode_buckets, mixed_buckets
from tokenfleet.engine.execution.capture import Capture
from tokenfleet.engine.execution.flight import Flight, StepResult
from tokenfleet.engine.execution.memory import (
    CudaProbe,
    MemoryProbe,
    cpu_room,
    cuda_room,
    fitting_blocks,
    refusing,
)
from tokenfleet.engine.execution.placed_model import PlacedModel
from tokenfleet.engine.execution.placement import (
    check_quantization,
    kv_cache_dtype,
    pick_block_size,
    pick_capture,
    pick_device,
    pick_dtype,
    pick_max_len,
    pick_overlap,
)
from tokenfleet.engine.execution.profiling import run_largest_step, run_other_steps
from tokenfleet.engine.execution.runner import Runner
from tokenfleet.engine.execution.weights import NewWeights, WeightUpdate
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import load_decoder
from tokenfleet.engine.model.mlp import MoeMlp
from tokenfleet.engine.model.smoothing import SAMPLE
from tokenfleet.engine.model.spec import ModelSpec
from tokenfleet.engine.scheduling.plan import StepPlan
from tokenfleet.engine.text import TextCodec
from tokenfleet.engine.traffic import NO_TRAFFIC, Traffic, traffic_of
from tokenfleet.kernels.backend import uses_triton

logger = logging.getLogger("tokenfleet.engine")


class RunsSteps(Protocol):
    """What the core needs of a runner."""

    def launch(self, plan: StepPlan) -> Flight:
        """Begin a step; what the plan says of its sequences is read before this returns."""
        ...

    def collect(self, flight: Flight) -> StepResult:
        """Wait for the oldest flight; one row per chunk of its plan, in its order."""
        ...

    def prepare_weights(self, weights: NewWeights) -> WeightUpdate:
        """Check new weights; writing them is what changes something."""
        ...

    def sleep(self) -> None:
        """Free what can be made again; nothing is in flight."""
        ...

    def wake(self) -> None:
        """Make it again, or raise ConfigError and sleep on."""
        ...


class Vocabulary(Protocol):
    """What the core needs of a ModelSpec."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an output."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with its KV blocks."""

    spec: ModelSpec | Vocabulary
    runner: RunsSteps
    max_len: int
    """Longest prompt plus output."""
    block_size: int
    num_blocks: int
    """Usable blocks, the null block not counted."""
    traffic: Traffic = NO_TRAFFIC
    """What a step reads."""
    overlap: bool = False
    """Whether a step is launched before the one before it is settled."""


def load_model(
    config: EngineConfig,
    known_tokens: Collection[int] | None = None,
    capture: Capture | None = None,
) -> LoadedModel:
    """Read the checkpoint, and make it ready to run steps; see `place_model`.

    Raises:
        ConfigError, UnsupportedModel, CheckpointError.
    """
    path = Path(config.model)
    device = pick_device(config)
    check_quantization(config, device)
    spec = read_spec(path, max_model_len=config.max_model_len)
    pick_max_len(config, spec)  # refuses before anything is read
    dtype = pick_dtype(config, spec, device)
    with refusing(f"the weights of {path} were loaded"):
        decoder = load_decoder(
            path,
            spec,
            dtype=dtype,
            device=device,
            quantization=config.quantization,
            kv_dtype=kv_cache_dtype(config),
            sample=_sample(path, spec.vocab_size) if config.quantization == "int8" else (),
        )
    return place_model(config, decoder, known_tokens, capture)


def _sample(path: Path, vocab_size: int) -> list[int]:
    """Tokens of the text by which int8 layers are smoothed; none where there is no tokenizer."""
    try:
        ids = TextCodec.load(path).encode(SAMPLE)
    except (CheckpointError, InvalidRequest) as error:
        logger.warning("int8 rounds activations more coarsely than it could: %s", error)
        return []
    return [token for token in ids if token < vocab_size]


def place_model(
    config: EngineConfig,
    decoder: Decoder,
    known_tokens: Collection[int] | None = None,
    capture: Capture | None = None,
) -> LoadedModel:
    """Give a decoder its KV blocks, and capture its steps.

    capture: what steps are captured with; None = CUDA graphs on CUDA, unless enforce_eager.

    Raises:
        ConfigError: memory for the blocks is not there.
    """
    device, spec = decoder.device, decoder.spec
    block_size, max_len = pick_block_size(config, device), pick_max_len(config, spec)
    capture = capture or pick_capture(config, device)
    buckets = buckets_for(config, decoder) if capture is not None else []
    probe = CudaProbe(device) if device.type == "cuda" else None
    num_blocks = pick_num_blocks(config, decoder, block_size, max_len, probe, 3 * len(buckets))
    overlap = pick_overlap(config, device)
    with refusing(f"{num_blocks} KV blocks and the graphs were to fit"):
        placed = PlacedModel(
            decoder,
            num_slots=config.max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            max_len=max_len,
            known_tokens=known_tokens,
            device=device,
            ahead=overlap,
            capture=capture,
            buckets=buckets,
            quantization=config.quantization,
            probe=probe,
            record=not config.enforce_eager,
        )
        runner = Runner(placed)
    traffic = traffic_of(decoder)
    return LoadedModel(spec, runner, max_len, block_size, num_blocks, traffic, overlap)


def pick_num_blocks(
    config: EngineConfig,
    decoder: Decoder,
    block_size: int,
    max_len: int,
    probe: MemoryProbe | None,
    num_graphs: int,
) -> int:
    """Usable KV blocks; on a device with a probe, of what its profiling run leaves.

    Raises:
        ConfigError: with the sum that did not work out.
    """
    if probe is None:
        room = cpu_room()
    else:
        step = partial(run_largest_step, decoder, config, block_size, max_len)
        with refusing("the largest step was tried, before there were KV blocks,"):
            room = cuda_room(config, probe, step, num_graphs)
            run_other_steps(decoder, config, block_size, max_len)
    per_block = decoder.kv_bytes_per_block(block_size)
    return fitting_blocks(config, room, per_block=per_block, block_size=block_size, max_len=max_len)


def buckets_for(config: EngineConfig, decoder: Decoder) -> list[Bucket]:
    """The steps that are captured; none where a layer looks at its values on the host."""
    if any(isinstance(layer.mlp, MoeMlp) for layer in decoder.layers):
        return []
    if decoder.device.type == "cuda" and not uses_triton(decoder.embedding):
        return decode_buckets(config.max_num_seqs)  # the reference reads where chunks begin
    mixed = mixed_buckets(config.max_num_batched_tokens, config.max_num_seqs)
    return decode_buckets(config.max_num_seqs) + mixed
