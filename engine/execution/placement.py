"""How many KV blocks an engine gets, and on what device and in what dtype it runs.

The number is decided once, at the start; a refusal shows the sum that did not work out.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import ConfigError
from tokenfleet.engine.execution.capture import Capture, CudaGraphCapture
from tokenfleet.engine.execution.dtype_memory import fastest_dtype
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.spec import ModelSpec

CPU_SHARE = 0.25
"""Part of the memory that is available at the start which KV blocks may come to use on a CPU."""

_GIB = 1 << 30
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def pick_device(config: EngineConfig) -> torch.device:
    """The device that `config.device` means on this machine.

    Raises:
        ConfigError: CUDA is asked for and not there.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError('device is "cuda" and torch finds no CUDA device; use "cpu" or "auto"')
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def pick_dtype(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The configured dtype; auto = the checkpoint's on CUDA, on a CPU the fastest that is safe."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cuda":
        return _DTYPES[spec.dtype]
    narrow = [torch.float16] if spec.float16_safe else []
    return fastest_dtype([torch.float32, torch.bfloat16, *narrow])


def check_quantization(config: EngineConfig, device: torch.device) -> None:
    """Refuse a quantization that this device has no products for.

    Raises:
        ConfigError: naming what works here.
    """
    if config.quantization == "int8" and device.type != "cpu":
        raise ConfigError(
            f"quantization 'int8' is not available on {device.type}; use 'fp8' or 'fp8_block'"
        )


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


def pick_num_blocks(
    config: EngineConfig, decoder: Decoder, block_size: int, max_len: int, device: torch.device
) -> int:
    """Usable blocks: the configured number, else what memory holds and the slots can use.

    Raises:
        ConfigError: not even one sequence of max_len tokens fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    per_block = decoder.kv_bytes_per_block(block_size)
    most_useful = config.max_num_seqs * -(-max_len // block_size)
    budget = _cuda_budget(config) if device.type == "cuda" else _cpu_budget()
    fitting = budget // per_block - 1
    needed = -(-max_len // block_size)
    if fitting < needed:
        raise ConfigError(
            f"one sequence of max_model_len {max_len} needs {needed} KV blocks of "
            f"{per_block} bytes and memory has room for {max(fitting, 0)} "
            f"({budget / _GIB:.2f} GiB); lower max_model_len or free memory"
        )
    return min(fitting, most_useful)


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


def _cuda_budget(config: EngineConfig) -> int:
    """Bytes left of this process's share of the card, after what it holds and has peaked at."""
    _free, total = torch.cuda.mem_get_info()
    held = torch.cuda.max_memory_reserved()
    return int(total * config.gpu_memory_fraction) - held


def _cpu_budget() -> int:
    return int(available_memory_bytes() * CPU_SHARE)


def available_memory_bytes() -> int:
    """Memory that can be used without swapping: the machine's, or the control group's if less."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if not limit.is_file() or limit.read_text().strip() == "max":
        return machine
    used = int((limit.parent / "memory.current").read_text())
    lines = (limit.parent / "memory.stat").read_text().splitlines()
    files = next((int(x.split()[1]) for x in lines if x.startswith("inactive_file ")), 0)
    return min(machine, int(limit.read_text()) - used + files)
