"""`auto` means one dtype on one machine, however busy it is when it is asked."""

import torch

from tokenfleet.engine.execution import dtype_memory

CANDIDATES = [torch.float32, torch.bfloat16]


def test_the_first_choice_is_kept_by_later_processes(tmp_path, monkeypatch):
    answers = iter([torch.bfloat16, torch.float32])
    monkeypatch.setattr(dtype_memory, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(dtype_memory, "choose_dtype", lambda _candidates: next(answers))
    assert dtype_memory.fastest_dtype(CANDIDATES) is torch.bfloat16
    assert dtype_memory.fastest_dtype(CANDIDATES) is torch.bfloat16
    assert dtype_memory.fastest_dtype([*CANDIDATES, torch.float16]) is torch.float32


def test_a_damaged_memory_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(dtype_memory, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(dtype_memory, "choose_dtype", lambda _candidates: torch.bfloat16)
    for content in ("", "[]", "{no json"):
        (tmp_path / "dtype.json").write_text(content)
        assert dtype_memory.fastest_dtype(CANDIDATES) is torch.bfloat16


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(dtype_memory, "cache_folder", lambda: tmp_path / "file" / "below")
    monkeypatch.setattr(dtype_memory, "choose_dtype", lambda _candidates: torch.bfloat16)
    assert dtype_memory.fastest_dtype(CANDIDATES) is torch.bfloat16
