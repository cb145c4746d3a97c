"""How much memory KV blocks may take, as a sum that a refusal can show.

The sum is made of what this process itself holds and needs, never of differences of the card's free
memory: what a neighbour allocates or frees meanwhile changes nothing in it. Whether the result is
really there is a second question, asked last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.errors import ConfigError
from tokenfleet.engine.execution.containment import is_out_of_memory

CPU_SHARE = 0.25
"""Part of the memory that is available at the start which KV blocks may come to use on a CPU."""
CONTEXT_BYTES = 1 << 30
"""What a process takes of a card beside torch's allocator: CUDA's context, the libraries' own."""
GRAPH_BYTES = 4 << 20
"""What one CUDA graph takes beside its tensors."""

_GIB = 1 << 30


class MemoryProbe(Protocol):
    """What can be known of a card's memory, in bytes."""

    def total(self) -> int:
        """Of the whole card."""
        ...

    def free(self) -> int:
        """Of the whole card, whoever holds the rest."""
        ...

    def held(self) -> int:
        """By tensors of this process, now."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """The most that they held while `work` ran. What it frees goes back to the card."""
        ...


class CudaProbe:
    """Asks CUDA and torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """As the driver says."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """As the driver says, after this process's allocator gave back what it only keeps."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        """As torch's allocator says."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self, work: Callable[[], object]) -> int:
        """As torch's allocator says, once the device has done all of the work."""
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for KV blocks."""

    promised: int
    """Bytes that the settings leave for them."""
    there: int
    """Bytes that could be allocated for them now."""
    sum: str
    """How `promised` came about, for people."""


def cpu_room() -> Room:
    """A share of what is available."""
    available = available_memory_bytes()
    promised = int(available * CPU_SHARE)
    return Room(promised, available, f"a quarter of the available memory is {gib(promised)}")


def cuda_room(
    config: EngineConfig, probe: MemoryProbe, step: Callable[[], object], num_graphs: int
) -> Room:
    """The process's share of the card, less what it holds and what its largest step needs.

    Args:
        step: the profiling run, a step as large as any; the weights are loaded by now.
        num_graphs: CUDA graphs that will be captured. Their memory is their own: it is counted
            like a second largest step.
    """
    total, weights = probe.total(), probe.held()
    activations = probe.peak(step) - weights
    graphs = num_graphs * GRAPH_BYTES + (activations if num_graphs else 0)
    share = int(total * config.gpu_memory_fraction)
    promised = share - weights - activations - graphs - CONTEXT_BYTES
    terms = (
        f"gpu_memory_fraction {config.gpu_memory_fraction:g} of {gib(total)} is {gib(share)}, less"
        f" weights {gib(weights)}, largest step {gib(activations)}, CUDA graphs {gib(graphs)},"
        f" CUDA's context {gib(CONTEXT_BYTES)}: {gib(promised)}"
    )
    return Room(promised, probe.free() - activations - graphs, terms)


def fitting_blocks(
    config: EngineConfig, room: Room, *, per_block: int, block_size: int, max_len: int
) -> int:
    """Usable blocks: the configured number, else what the room holds and the slots can use.

    Raises:
        ConfigError: not one sequence of max_len tokens fits, or the memory is not there.
    """
    needed = -(-max_len // block_size)
    count = config.num_blocks
    if count is None:
        fitting = room.promised // per_block - 1
        if fitting < needed:
            raise ConfigError(
                f"one sequence of max_model_len {max_len} needs {needed} KV blocks of {per_block}"
                f" bytes and memory has room for {max(fitting, 0)} ({room.sum}); lower"
                " max_model_len or max_num_batched_tokens, or give the engine more memory"
            )
        count = min(fitting, config.max_num_seqs * needed)
    wanted = (count + 1) * per_block
    if wanted > room.there:
        raise ConfigError(
            f"{count} KV blocks take {gib(wanted)} and {gib(room.there)} are free for them"
            f" ({room.sum}); end processes that hold the rest, or lower num_blocks or"
            " gpu_memory_fraction"
        )
    return count


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn out-of-memory at the start into a refusal that says what did not fit.

    Raises:
        ConfigError: in place of torch's error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{what} and memory ran out: another process may hold it; end that, or use a larger"
            f" machine, a quantization or smaller limits ({error})"
        ) from error


def check_free(probe: MemoryProbe, needed: int) -> None:
    """Refuse to wake where weights and blocks would not fit.

    Raises:
        ConfigError: with both figures.
    """
    free = probe.free()
    if needed > free:
        raise ConfigError(
            f"weights and KV blocks take {gib(needed)} and {gib(free)} are free; wake the engine"
            " again when other processes have given memory back"
        )


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / _GIB:.2f} GiB"


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
