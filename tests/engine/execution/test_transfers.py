"""Copies to and from a GPU, and what is asked of its memory, with a CUDA that only takes notes."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tokenfleet.engine.execution.memory import CudaProbe
from tokenfleet.engine.execution.transfers import CudaTransfers

HOST = torch.device("cpu")


class Notes(list):
    """What was asked of CUDA, in order."""

    def stream(self, name):
        return FakeStream(self, name)

    @contextmanager
    def within(self, stream):
        self.append(f"on {stream.name}")
        yield
        self.append(f"off {stream.name}")

    def event(self):
        return FakeEvent(self)


class FakeStream:
    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, notes):
        self.notes = notes

    def record(self, stream):
        self.notes.append(f"recorded on {stream.name}")

    def synchronize(self):
        self.notes.append("waited")


@pytest.fixture
def notes(monkeypatch):
    found, empty = Notes(), torch.empty

    def noted_empty(*shape, pin_memory=False, **options):
        if pin_memory:
            found.append("pinned")
        return empty(*shape, **options)

    def noted_copy(tensor, source, non_blocking=False):  # torch's own signature
        found.append("copied beside" if non_blocking else "copied in between")
        return tensor.set_(source.clone())

    def pinned(tensor):
        found.append("pinned")
        return tensor.clone()

    fakes = {
        "Stream": lambda _device: found.stream("side"),
        "current_stream": lambda _device: found.stream("main"),
        "stream": found.within, "Event": found.event,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", noted_empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", noted_copy)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda _tensor, stream: found.append(f"kept for {stream.name}"),
    )
    return found


def test_a_result_is_copied_behind_the_step_on_the_side_and_read_after_its_event(notes):
    wait = CudaTransfers(HOST).fetch([torch.tensor([3, 1, 4])])
    assert notes == [
        "side waits for main", "on side", "pinned", "copied beside", "kept for side",
        "recorded on side", "off side",
    ]  # fmt: skip
    assert wait()[0].tolist() == [3, 1, 4]
    assert notes[-1] == "waited"


def test_what_is_sent_goes_by_pinned_memory_and_its_array_may_be_used_again(notes):
    transfers, array, kept = CudaTransfers(HOST), np.arange(3), torch.zeros(3, dtype=torch.int64)
    sent = transfers.send(array)
    transfers.refill(kept, array[::-1])
    array[:] = 9
    assert sent.tolist() == [0, 1, 2]
    assert kept.tolist() == [2, 1, 0]
    assert notes == ["pinned", "pinned", "copied beside"]


def test_a_peak_is_of_the_work_alone_and_what_is_cached_counts_as_free(monkeypatch):
    asked = []
    answers = {
        "mem_get_info": (3, 8), "memory_allocated": 2, "max_memory_allocated": 5,
        "empty_cache": None, "reset_peak_memory_stats": None, "synchronize": None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, n=name, a=answer: (asked.append(n), a)[1])
    probe = CudaProbe(HOST)
    assert (probe.total(), probe.held()) == (8, 2)
    asked.clear()
    assert probe.peak(lambda: asked.append("work")) == 5
    assert asked == ["reset_peak_memory_stats", "work", "synchronize", "max_memory_allocated"]
    asked.clear()
    assert probe.free() == 3
    assert asked == ["empty_cache", "mem_get_info"]
