"""From a config to a model that can run steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.execution.buckets import Bucket, decode_buckets, mixed_buckets
from tokenfleet.engine.execution.capture import Capture
from tokenfleet.engine.execution.flight import Flight, Outcome
from tokenfleet.engine.execution.placement import (
    check_quantization,
    pick_block_size,
    pick_capture,
    pick_device,
    pick_dtype,
    pick_max_len,
    pick_num_blocks,
    pick_overlap,
)
from tokenfleet.engine.execution.runner import Runner
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import load_decoder
from tokenfleet.engine.model.mlp import DenseMlp
from tokenfleet.engine.model.spec import ModelSpec
from tokenfleet.engine.scheduling.plan import StepPlan
from tokenfleet.engine.traffic import NO_TRAFFIC, Traffic, traffic_of


class RunsSteps(Protocol):
    """What the core needs of a runner."""

    def launch(self, plan: StepPlan) -> Flight:
        """Begin a step; what the plan says of its sequences is read before this returns."""
        ...

    def collect(self, flight: Flight) -> list[Outcome]:
        """Wait for the oldest flight; one outcome per chunk of its plan, in its order."""
        ...


class Vocabulary(Protocol):
    """What the core needs of a ModelSpec."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


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
    """Read the checkpoint, place it, and allocate its KV blocks.

    capture: what steps are captured with; None = CUDA graphs on CUDA, unless enforce_eager.

    Raises:
        ConfigError, UnsupportedModel, CheckpointError.
    """
    path = Path(config.model)
    device = pick_device(config)
    check_quantization(config, device)
    block_size = pick_block_size(config, device)
    spec = read_spec(path, max_model_len=config.max_model_len)
    max_len = pick_max_len(config, spec)
    dtype = pick_dtype(config, spec, device)
    decoder = load_decoder(
        path,
        spec,
        dtype=dtype,
        device=device,
        quantization=config.quantization,
        kv_in_fp8=config.kv_cache_dtype == "fp8",
    )
    num_blocks = pick_num_blocks(config, decoder, block_size, max_len, device)
    overlap = pick_overlap(config, device)
    capture = capture or pick_capture(config, device)
    buckets = buckets_for(config, decoder) if capture is not None else []
    runner = Runner(
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
    )
    traffic = traffic_of(decoder)
    return LoadedModel(spec, runner, max_len, block_size, num_blocks, traffic, overlap)


def buckets_for(config: EngineConfig, decoder: Decoder) -> list[Bucket]:
    """The steps that are captured; none where a layer looks at its values on the host."""
    if not all(isinstance(layer.mlp, DenseMlp) for layer in decoder.layers):
        return []
    mixed = mixed_buckets(config.max_num_batched_tokens, config.max_num_seqs)
    return decode_buckets(config.max_num_seqs) + mixed
