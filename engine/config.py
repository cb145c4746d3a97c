"""What an engine is started with; a config that exists is in range.

Whether it fits the model and the machine is decided where those are known (execution/placement.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenfleet.engine.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = (None, "int8", "fp8", "fp8_block")
KV_CACHE_DTYPES = ("auto", "model", "fp8", "int8")
_MOST = 2**31 - 1
"""Of anything that is counted."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Raises:
        ConfigError: a value out of range, naming it and the way out.
    """

    model: str | Path
    """Directory with config.json, safetensors and tokenizer."""
    max_num_seqs: int = 64
    """Slots: sequences that run at once. More raises throughput and the memory of a step. At most
    max_num_batched_tokens."""
    max_num_batched_tokens: int = 576
    """Token budget of one step. Larger: prompts are done sooner, running streams wait longer. A
    prompt that fits beside the running streams is not cut: 512 tokens do beside 64 of them."""
    max_chunk_tokens: int | None = None
    """Longest piece of one prompt in a step; None = the whole budget. Smaller: several prompts
    share a step and a huge one cannot take all of it."""
    block_size: int | None = None
    """Tokens per KV block, a power of two; None = 16 on CUDA, 32 on the CPU."""
    num_blocks: int | None = None
    """Usable KV blocks (the null block not counted); None = from memory."""
    max_model_len: int | None = None
    """Longest prompt plus output; None = what the model was made for."""
    prefix_cache: bool = True
    """Keep finished blocks for prompts that begin alike."""
    gpu_memory_fraction: float = 0.9
    """Share of the card's memory that this process may use. On a CPU it means nothing: a quarter of
    the memory that is available at the start may go to KV blocks there."""
    enforce_eager: bool = False
    """No CUDA graphs, no recorded steps on a CPU."""
    overlap: bool | None = None
    """Schedule the next step while the device computes this one; None = on CUDA. Outputs are the
    same; events come one step later."""
    dtype: str = "auto"
    """auto = the checkpoint's on CUDA, the fastest measured one on a CPU."""
    device: str = "auto"
    """auto = CUDA where torch finds a device, else the CPU."""
    quantization: str | None = None
    """Weights and activations of the layers' products in 8 bits: "int8" (on a CPU), "fp8" (a scale
    per output and per token), "fp8_block" (per 128 x 128 weights and per 128 inputs). On a CPU FP8
    only computes what a GPU would, slowly. None = as the checkpoint is, which may be FP8."""
    kv_cache_dtype: str = "auto"
    """auto = int8 beside quantization "int8", else the model's dtype, which "model" always means.
    "int8" (on a CPU): half the memory of 16 bits, a scale for each token and head. "fp8": the same
    over the checkpoint's scales (1 where it brings none); on a CPU slow."""
    seed: int | None = None
    """Source of the seeds of requests that bring none; None = random."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path):
            raise ConfigError(f"model must be the path of a directory, got {self.model!r}")
        object.__setattr__(self, "model", Path(self.model))
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _positive(name, getattr(self, name))
        for name in ("max_chunk_tokens", "num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least"
                f" max_num_seqs ({self.max_num_seqs}): every running sequence needs one token a"
                " step; raise it, or lower max_num_seqs"
            )
        _check_block_size(self.block_size)
        fraction: object = self.gpu_memory_fraction
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not number or not 0.0 < fraction <= 1.0:  # type: ignore[operator] # a number
            raise ConfigError(
                f"gpu_memory_fraction must be above 0 and at most 1, got {fraction!r}"
            )
        for name in ("prefix_cache", "enforce_eager"):
            _one_of(name, getattr(self, name), (True, False))
        if self.seed is not None and (
            not isinstance(self.seed, int) or isinstance(self.seed, bool)
        ):
            raise ConfigError(f"seed must be an integer, or None, got {self.seed!r}")
        _one_of("overlap", self.overlap, (True, False, None))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise ConfigError(f"{name} must be an integer from 1 to {_MOST}, got {value!r}")


def _check_block_size(size: int | None) -> None:
    if size is None:
        return
    _positive("block_size", size)
    if size & (size - 1):
        below = 1 << (size.bit_length() - 1)
        raise ConfigError(
            f"block_size must be a power of two, got {size}; use {below} or {2 * below}"
        )


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not isinstance(value, str | bool | None) or value not in allowed:
        raise ConfigError(f"{name} must be one of {allowed}, got {value!r}")
