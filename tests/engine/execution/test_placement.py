"""What `auto` means where the weights are in int8, and what a device refuses."""

import pytest
import torch

from tokenfleet.engine import Engine, EngineConfig
from tokenfleet.engine.errors import ConfigError
from tokenfleet.engine.execution import placement
from tokenfleet.engine.execution.placement import check_quantization, pick_device


@pytest.mark.parametrize(
    ("settings", "cached"),
    [
        ({}, torch.bfloat16),
        ({"quantization": "int8"}, torch.int8),
        ({"quantization": "int8", "kv_cache_dtype": "model"}, torch.bfloat16),
        ({"kv_cache_dtype": "int8"}, torch.int8),
        ({"kv_cache_dtype": "fp8"}, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_keys_and_values_are_cached_in(tiny_random, settings, cached):
    engine = Engine(
        EngineConfig(
            tiny_random("llama"), device="cpu", dtype="bfloat16", num_blocks=40, **settings
        )
    )
    assert engine.core.runner.model.pools[0].k.dtype == cached


@pytest.mark.parametrize("name", ["quantization", "kv_cache_dtype"])
def test_int8_is_refused_on_cuda_by_name(tmp_path, name):
    config = EngineConfig(tmp_path, **{name: "int8"})
    check_quantization(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"{name} 'int8' is not available on cuda; use 'fp8'"):
        check_quantization(config, torch.device("cuda"))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate"),
         r"found version 11040\); mend that"),
        (AssertionError("Torch not compiled with CUDA enabled"), "not compiled with CUDA"),
        (None, "the driver shows none"),
    ],
    ids=["driver", "build", "hidden"],
)  # fmt: skip
def test_a_card_that_torch_does_not_find_is_refused_with_what_torch_says(
    said, told, tmp_path, monkeypatch
):
    def init():
        if said is not None:
            raise said

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match=told):
        pick_device(EngineConfig(tmp_path, device="cuda"))


@pytest.mark.parametrize(("capability", "device"), [((7, 5), "cpu"), ((8, 0), "cuda")])
def test_a_card_below_every_kernels_generation_is_not_used(
    capability, device, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert pick_device(EngineConfig(tmp_path)) == torch.device(device)
    if device == "cpu":
        with pytest.raises(
            ConfigError, match=r"Tesla T4 is of generation \(7, 5\), below \(8, 0\)"
        ):
            pick_device(EngineConfig(tmp_path, device="cuda"))


@pytest.mark.parametrize(("hidden", "told"), [(None, True), ("", False)], ids=["seen", "hidden"])
def test_auto_says_why_it_runs_on_a_cpu_beside_a_card(hidden, told, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(placement, "DRIVER", tmp_path)
    if hidden is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert pick_device(EngineConfig(tmp_path)) == torch.device("cpu")
    assert ("beside a GPU: torch" in caplog.text) == told
