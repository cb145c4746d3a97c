"""The memory of CUDA graphs, and which errors of a device nothing survives, without a device."""

import gc
from contextlib import contextmanager, nullcontext
from itertools import count

import pytest
import torch

from tokenfleet.engine.execution.capture import CudaGraphCapture
from tokenfleet.engine.execution.containment import is_fatal, is_out_of_memory


class FakeGraph:
    """As torch.cuda.CUDAGraph: it keeps its pool alive."""

    def replay(self):
        pass


class FakeStream:
    device = torch.device("cpu")

    def wait_stream(self, other):
        pass


@pytest.fixture
def pools(monkeypatch):
    """The pools that graphs were captured into, in order."""
    used, handles = [], count()

    @contextmanager
    def graph(_graph, pool, stream):
        used.append(pool)
        yield

    fakes = {
        "graph_pool_handle": lambda: next(handles), "Stream": lambda _device: FakeStream(),
        "current_stream": lambda _device: FakeStream(), "stream": lambda _stream: nullcontext(),
        "CUDAGraph": FakeGraph, "graph": graph,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return used


def test_graphs_share_a_pool_as_long_as_one_of_them_lives(pools):
    """The allocator forgets a pool with its last graph; nothing may be captured into it again."""
    capture = CudaGraphCapture(torch.device("cuda"))
    kept = [capture(lambda: None), capture(lambda: None)]
    del kept[0]
    kept.append(capture(lambda: None))
    assert len(set(pools)) == 1
    kept.clear()  # asleep
    gc.collect()
    awake = [capture(lambda: None), capture(lambda: None)]
    assert pools[3] == pools[4] != pools[0]
    assert len(awake) == 2


@pytest.mark.parametrize(
    ("error", "fatal", "memory"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True, False),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
            True,
            False,
        ),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), True, False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False, True),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
        (torch.AcceleratorError("CUDA error: out of memory"), False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), False, True),
        (ValueError("a shape"), False, False),
    ],
    ids=str,
)
def test_a_lost_device_is_told_from_a_full_one_whoever_reports_it(error, fatal, memory):
    assert (is_fatal(error), is_out_of_memory(error)) == (fatal, memory)
