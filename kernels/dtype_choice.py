"""Which dtype this machine multiplies fastest in, by a short measurement.

CPUs differ by factors in both directions: bf16 is the best where AMX is there and the worst where
it is emulated. Counted is the CPU time of one thread, so that a machine busy with something else
gives the same answer as an idle one.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tokenfleet.kernels.linear import PackedWeight, linear, pack_linear

# another dtype must be this much faster to be taken in place of one that stands before it
TIE = 1.15

SHAPE = (1536, 576)
ALONE, TOGETHER, PROMPT_ROWS = 1, 8, 256
NUM_WEIGHTS = 4  # more than one, so that weights do not stay in the nearest cache
REPEATS = 3


def choose_dtype(
    candidates: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    *,
    device: str = "cpu",
) -> torch.dtype:
    """The fastest of `candidates` (in order of preference), in under 0.3 s on an idle machine.

    On CUDA nothing is measured: bfloat16 where it is among the candidates.
    """
    if not candidates:
        raise ValueError("candidates must name at least one dtype")
    if device != "cpu":
        return torch.bfloat16 if torch.bfloat16 in candidates else candidates[0]
    if len(candidates) == 1:
        return candidates[0]
    return fastest(measure_dtypes(candidates))


def fastest(cost_s: dict[torch.dtype, float]) -> torch.dtype:
    """The first entry that no later one beats by more than a tie."""
    chosen, *others = cost_s
    for dtype in others:
        if cost_s[dtype] * TIE < cost_s[chosen]:
            chosen = dtype
    return chosen


def measure_dtypes(candidates: Sequence[torch.dtype]) -> dict[torch.dtype, float]:
    """Seconds per dtype for eight prompts of 564 and outputs of 128 tokens, at once and in a row.

    Per weight, on one thread: 128 steps of 8 rows, 1,024 of one row and 9,024 prompt rows. Turns
    are taken dtype by dtype and the best of three counts, so that a bad moment hits none alone.
    """
    with torch.inference_mode(), _one_thread():
        packed = {dtype: _weights(dtype) for dtype in candidates}
        best: dict[tuple[torch.dtype, int], float] = {}
        for _ in range(REPEATS):
            for dtype in candidates:
                for rows in (ALONE, TOGETHER, PROMPT_ROWS):
                    spent = _time(packed[dtype], torch.ones(rows, SHAPE[1], dtype=dtype))
                    best[dtype, rows] = min(spent, best.get((dtype, rows), spent))
    times = {ALONE: 8 * 128, TOGETHER: 128, PROMPT_ROWS: 2 * 8 * 564 / PROMPT_ROWS}
    return {
        dtype: sum(count * best[dtype, rows] for rows, count in times.items())
        for dtype in candidates
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _weights(dtype: torch.dtype) -> list[PackedWeight]:
    packed = [pack_linear(torch.ones(SHAPE, dtype=dtype)) for _ in range(NUM_WEIGHTS)]
    for weight in packed:  # the first product of a dtype may compile its kernel
        linear(torch.ones(TOGETHER, SHAPE[1], dtype=dtype), weight)
    return packed


def _time(packed: list[PackedWeight], x: torch.Tensor) -> float:
    started = time.thread_time()
    for weight in packed:
        linear(x, weight)
    return time.thread_time() - started
