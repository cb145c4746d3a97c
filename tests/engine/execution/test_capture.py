"""The memory of CUDA graphs, and which errors of a device nothing survives, without a device."""

import gc
from contextlib import contextmanager
from itertools import count

import pytest
import torch

from tokenfleet.engine import ConfigError
from tokenfleet.engine.execution.capture import CudaGraphCapture
from tokenfleet.engine.execution.containment import is_fatal, is_out_of_memory


class FakeGraph:
    """As torch.cuda.CUDAGraph: it keeps its pool alive."""

    def replay(self):
        pass


class FakeStream:
    device = torch.device("cpu")

    def __init__(self, name="side"):
        self.name = name

    def wait_stream(self, other):
        pass


@pytest.fixture
def pools(monkeypatch):
    """The pools that graphs were captured into, in order."""
    used, handles, current = [], count(), [FakeStream("main")]

    @contextmanager
    def on(stream):
        before = current[0]
        current[0] = stream
        try:
            yield
        finally:
            current[0] = before

    @contextmanager
    def graph(_graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        used.append(pool)
        before, current[0] = current[0], stream
        yield
        current[0] = before  # as torch's: not where the work raises

    fakes = {
        "graph_pool_handle": lambda: next(handles), "Stream": lambda _device: FakeStream(),
        "current_stream": lambda _device: current[0], "stream": on,
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


def test_no_garbage_is_collected_while_work_is_captured(pools):
    """What dies in a capture may be a graph or an event of an engine before this one."""
    seen = []
    CudaGraphCapture(torch.device("cuda"))(lambda: seen.append(gc.isenabled()))
    assert seen == [True, False]  # warming up, captured
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (
            torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
            ConfigError,
            "not permitted when stream is capturing.*enforce_eager",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "out of memory"),
    ],
    ids=["illegal", "memory"],
)
def test_work_that_cannot_be_captured_is_refused_with_the_way_out(pools, error, raised, words):
    runs = []

    def work():
        runs.append(0)
        if len(runs) == 2:  # it runs, and fails where it is captured
            raise error

    with pytest.raises(raised, match=words):
        CudaGraphCapture(torch.device("cuda"))(work)
    assert gc.isenabled()
    assert torch.cuda.current_stream("cuda").name == "main"


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
