"""On what device, in what dtype and in which way an engine runs: what `auto` and None mean.

Each is decided once, at the start. How many KV blocks it gets is decided in memory.py.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import ConfigError
from tokenfleet.engine.execution.capture import Capture, CudaGraphCapture
from tokenfleet.engine.execution.dtype_memory import fastest_dtype
from tokenfleet.engine.model.spec import ModelSpec
from tokenfleet.kernels.fp8 import FP8

logger = logging.getLogger("tokenfleet.engine")

LEAST_CAPABILITY = (8, 0)
"""Of a card: below there are no bf16 tensor cores, and no kernel is compiled for it."""
DRIVER = Path("/dev/nvidiactl")
"""Is there where NVIDIA's driver is loaded."""

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_KV_CACHE_DTYPES = {"model": None, "fp8": FP8, "int8": torch.int8}


def pick_device(config: EngineConfig) -> torch.device:
    """The device that `config.device` means on this machine; `auto` on a card that cannot be used
    is the CPU, and a warning why.

    Raises:
        ConfigError: CUDA is asked for and not there, or the card is too old.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    why = _why_no_cuda()
    if why is None:
        return torch.device("cuda")
    if config.device == "cuda":
        raise ConfigError(f'device is "cuda" and {why}; mend that, or use "cpu" or "auto"')
    if _has_card():
        logger.warning("device is auto and runs on the CPU, slowly, beside a GPU: %s", why)
    return torch.device("cpu")


def _why_no_cuda() -> str | None:
    """What is in the way, as torch says it: no driver, one too old, a build without CUDA."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_capability()
        if found >= LEAST_CAPABILITY:
            return None
        return f"{torch.cuda.get_device_name()} is of generation {found}, below {LEAST_CAPABILITY}"
    said = "the driver shows none (CUDA_VISIBLE_DEVICES, nvidia-smi)"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0].rstrip(".")
    return f"torch {torch.__version__} finds no CUDA device: {said}"


def _has_card() -> bool:
    """Whether a driver is loaded, and cards are not hidden on purpose."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return DRIVER.exists() and not hidden


def pick_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The configured dtype; auto = the checkpoint's on CUDA, on a CPU the fastest that is safe."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cuda":
        return _DTYPES[spec.dtype]
    narrow = [torch.float16] if spec.float16_safe else []
    return fastest_dtype([torch.float32, torch.bfloat16, *narrow])


def check_quantization(config: EngineConfig, device: torch.device) -> None:
    """Refuse a quantization, of weights or of the KV cache, that this device has no kernels for.

    Raises:
        ConfigError: naming what works here.
    """
    if config.quantization == "int8" and device.type != "cpu":
        raise ConfigError(
            f"quantization 'int8' is not available on {device.type}; use 'fp8' or 'fp8_block'"
        )
    if config.kv_cache_dtype == "int8" and device.type != "cpu":
        raise ConfigError(f"kv_cache_dtype 'int8' is not available on {device.type}; use 'fp8'")


def kv_cache_dtype(config: EngineConfig) -> torch.dtype | None:
    """Of cached keys and values; None = the model's. auto = 8 bits where the weights have them on a
    CPU: a step's attention is half as many bytes, and loses less than the products do."""
    if config.kv_cache_dtype == "auto":
        return torch.int8 if config.quantization == "int8" else None
    return _KV_CACHE_DTYPES[config.kv_cache_dtype]


def pick_overlap(config: EngineConfig, device: torch.device) -> bool:
    """The configured choice; None = where a device computes beside the host."""
    return device.type == "cuda" if config.overlap is None else config.overlap


def pick_capture(config: EngineConfig, device: torch.device) -> Capture | None:
    """CUDA graphs where there is a CUDA device, unless they are switched off."""
    if device.type != "cuda" or config.enforce_eager:
        return None
    return CudaGraphCapture(device)


def pick_block_size(config: EngineConfig, device: torch.device) -> int:
    """Tokens per block: the configured number, else 16 on CUDA and 32 on a CPU."""
    return config.block_size or (16 if device.type == "cuda" else 32)


def pick_max_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Longest prompt plus output.

    Raises:
        ConfigError: max_model_len is beyond what the model's positions reach.
    """
    if config.max_model_len is None:
        return spec.max_model_len
    if config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the {spec.max_model_len} positions "
            f"of this {spec.model_type} model; use at most {spec.max_model_len}"
        )
    return config.max_model_len
