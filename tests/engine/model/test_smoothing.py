"""Layers in int8 whose loud channels are made quiet: the same function, less of it rounded off."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenfleet.engine import Engine, EngineConfig, SamplingParams
from tokenfleet.engine.execution.loading import load_model
from tokenfleet.engine.model import smoothing
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.smoothing import can_smooth
from tokenfleet.kernels.backend import using
from tokenfleet.kernels.linear import PackedWeight

SAMPLE = [7 * i % 250 for i in range(40)]
PROMPT = [11 * i % 240 + 3 for i in range(60)]
SMOOTHED = {"llama", "qwen3", "qwen2", "granite"}


def make_loud(path):
    """Some channels of norms and up projections are thirty times what the others are."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()  # it may be a link to the original
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight") or "up_proj" in name:
            tensor[::17] *= 30.0
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.fixture
def loud(tiny_random, edited):
    return make_loud(edited(tiny_random("llama")))


def without_rounding(weight, bias, *, quantization, dtype):
    assert quantization == "int8"
    return PackedWeight(*weight.shape, dtype, "plain", weight.to(dtype), bias)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_without_rounding_a_smoothed_layer_is_the_old_one(tiny_random, driver, family, monkeypatch):
    path = tiny_random(family)
    exact = driver(path).prefill(PROMPT, 16)
    monkeypatch.setattr(smoothing, "pack_linear", without_rounding)
    smoothed, apart = (driver(path, quantization="int8", sample=s) for s in (SAMPLE, ()))
    torch.testing.assert_close(smoothed.prefill(PROMPT, 16), exact, rtol=1e-4, atol=1e-4)
    for one, other in zip(smoothed.decoder.layers, apart.decoder.layers, strict=True):
        factor = other.attn_in / one.attn_in
        assert factor.log().mean().abs() < 1e-4
        assert factor.std() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_rounded_to_the_dtype_lose_nothing_of_their_product(dtype):
    norm, factor = torch.rand(200) + 0.3, (torch.randn(200) / 2).exp()
    norm[3] = 0.0
    quotient, back = smoothing._divided(norm.to(dtype), factor)
    assert quotient.dtype == dtype
    assert back.isfinite().all()
    torch.testing.assert_close(quotient.float() * back, norm.to(dtype).float(), rtol=1e-6, atol=0)


def test_where_channels_are_loud_int8_loses_a_third_less_at_least(loud, driver):
    exact = driver(loud).prefill(PROMPT, 16)

    def error(**options):
        run = driver(loud, quantization="int8", **options)
        return (run.prefill(PROMPT, 16) - exact).norm() / exact.norm()

    assert error(sample=SAMPLE) < 0.67 * error()


def test_a_sample_is_cut_to_the_positions_of_a_short_model(tiny_random, driver):
    with using("reference"):  # which refuses to read beyond its tables
        run = driver(tiny_random("llama"), max_model_len=8, quantization="int8", sample=SAMPLE)
        assert run.prefill(PROMPT[:8], 8).isfinite().all()


def test_an_unused_or_poisoned_channel_gives_no_factor_that_is_no_number():
    x, weight = torch.randn(5, 6), torch.randn(4, 6)
    x[:, 1], weight[:, 2] = 0.0, 0.0
    for given in (x, torch.zeros(5, 6), torch.full((5, 6), torch.nan)):
        assert (smoothing._factor(given, weight) > 0).all()


def test_only_layers_whose_inputs_are_theirs_alone_are_smoothed(tiny_random):
    families = [*sorted(SMOOTHED), "gemma2", "gemma3_text", "mixtral", "olmo2"]
    found = {family for family in families if can_smooth(read_spec(tiny_random(family)))}
    assert found == SMOOTHED


def test_new_weights_are_smoothed_as_the_old_ones_were(loud):
    engine = Engine(EngineConfig(loud, device="cpu", quantization="int8", dtype="float32"))
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
    before = engine.generate([PROMPT], params)[0]
    assert len(engine.core.runner.model.decoder.sample) > 0
    engine.update_weights(loud)
    after = engine.generate([PROMPT], params)[0]
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def test_without_a_tokenizer_int8_is_loaded_all_the_same_and_says_so(tiny_random, edited, caplog):
    path = edited(tiny_random("llama"))
    for file in path.glob("tokenizer*"):
        file.unlink()
    with caplog.at_level(logging.WARNING, logger="tokenfleet.engine"):
        model = load_model(EngineConfig(path, device="cpu", quantization="int8", num_blocks=9,
                                        max_model_len=64))  # fmt: skip
    assert not model.runner.model.decoder.sample
    assert "more coarsely" in caplog.text
