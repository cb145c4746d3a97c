"""FP8 checkpoints mean what transformers computes from their dequantised weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenfleet.engine.errors import CheckpointError, ConfigError, UnsupportedModel
from tokenfleet.engine.execution.weights import WeightUpdate, _check_form
from tokenfleet.engine.model import loader
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import load_decoder
from tokenfleet.engine.model.mlp import GroupedMoeMlp
from tokenfleet.engine.model.quantization import is_ignored, read_quantization
from tokenfleet.engine.traffic import traffic_of
from tokenfleet.kernels import fp8
from tokenfleet.kernels.linear import PackedWeight

PROMPT = torch.randint(0, 256, (29,), generator=torch.Generator().manual_seed(9)).tolist()
Q_PROJ = "model.layers.1.self_attn.q_proj"
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def compressed(strategy, inputs=None, **more):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
               "strategy": strategy, "observer": "minmax"}  # fmt: skip
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": 1.5, **more,
    }  # fmt: skip


def inputs_in_fp8(strategy, *, dynamic, **more):
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": dynamic,
            "strategy": strategy, **more}  # fmt: skip


def logits_of(model):
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].float()


def assert_close(actual, wanted, atol=1e-4):
    torch.testing.assert_close(actual, wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("form", ["tensor", "channel", "block"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "gemma3_text"]
)
def test_weights_in_fp8_are_those_that_transformers_dequantises(
    tiny_random, make_fp8, reference, driver, family, form
):
    narrow, wide = make_fp8(
        tiny_random(family), form, compressed(form), kept=("mlp.gate.", "block_sparse_moe.gate.")
    )
    assert_close(driver(narrow).prefill(PROMPT, 16), logits_of(reference(wide)))


def test_blocks_that_end_with_a_part_of_a_fused_projection_stay_blocks(
    tiny_random, make_fp8, reference, driver
):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256}
    narrow, wide = make_fp8(tiny_random("llama", **sizes), "block", compressed("block"))
    run = driver(narrow)
    layer = run.decoder.layers[0]
    assert [p.fp8.rows for p in (layer.attention.qkv, layer.mlp.gate_up)] == [128, 128]
    assert layer.attention.qkv.fp8.weight.shape == (4, 2)
    assert_close(run.prefill(PROMPT, 16), logits_of(reference(wide)))


def round_inputs(model, rounded):
    """Let each projection of transformers' model see its inputs as `rounded` makes them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: (rounded(inputs[0], name),)
            )
    return model


def by_largest(x, scale):
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * scale


def by_token(x, _):
    return by_largest(x, x.abs().amax(-1, keepdim=True) / 448)


def by_group(x, _):
    return torch.cat([by_token(part, _) for part in x.split(128, dim=-1)], dim=-1)


def static_scale(module):
    return 0.03 if module.endswith("k_proj") else 0.02


def by_fixed(x, module):
    shared = module.endswith(("q_proj", "k_proj", "v_proj"))  # they have one input, so one scale
    return by_largest(x, 0.03 if shared else 0.02)


DYNAMIC = {
    "fp8 tensor": (TENSOR, "tensor", by_token, None),
    "fp8 block": (BLOCK, "block", by_group, None),
    "fp8 static": (STATIC, "tensor", by_fixed, static_scale),
    "compressed token": (
        compressed("channel", inputs_in_fp8("token", dynamic=True)), "channel", by_token, None),
    "compressed static": (
        compressed("tensor", inputs_in_fp8("tensor", dynamic=False)), "tensor", by_fixed,
        static_scale),
    "compressed block": (
        compressed("block", inputs_in_fp8("group", dynamic=True, group_size=128)), "block",
        by_group, None),
}  # fmt: skip


@pytest.mark.parametrize("kind", DYNAMIC)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_inputs_are_rounded_as_the_checkpoint_says(
    tiny_random, make_fp8, reference, driver, family, kind
):
    config, form, rounded, static = DYNAMIC[kind]
    narrow, wide = make_fp8(
        tiny_random(family), form, config, static=static, inverse=form == "block"
    )
    tokens = range(256)  # each alone: a value on the edge between two codes spoils its own row only
    with torch.inference_mode():
        wanted = round_inputs(reference(wide), rounded)(torch.tensor(tokens)[:, None]).logits[:, 0]
    run = driver(narrow, num_blocks=300)
    run.add(len(tokens))
    steps = [run.step({t: [t] for t in part}) for part in (tokens[:128], tokens[128:])]
    got = torch.cat([row for step in steps for row in step.values()])
    off = (got - wanted).abs().amax(1)
    assert (off < 1e-4).float().mean() > 0.8
    assert off.max() < 0.5


@pytest.mark.parametrize("missing", ["weight_scale", "input_scale"])
@pytest.mark.parametrize("module", [Q_PROJ, "model.layers.2.mlp.down_proj"])
def test_a_missing_scale_is_named(tiny_random, make_fp8, module, missing):
    path, _ = make_fp8(tiny_random("llama"), "tensor", STATIC, static=static_scale)
    change(path, lambda t: t.pop(f"{module}.{missing}"))
    with pytest.raises(CheckpointError, match=rf"{module}\.{missing} .* is missing"):
        load(path)


@pytest.mark.parametrize("form", ["tensor", "block"])
def test_a_scale_of_another_shape_is_named(tiny_random, make_fp8, form):
    path, _ = make_fp8(tiny_random("llama"), form, BLOCK if form == "block" else TENSOR)
    change(path, lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(5, 2)}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.weight_scale has shape \[5, 2\]"):
        load(path)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale_is_named(tiny_random, make_fp8, value):
    path, _ = make_fp8(tiny_random("llama"), "tensor", TENSOR)
    change(path, lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.tensor(value)}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.weight_scale holds a scale"):
        load(path)


def test_a_scale_that_nobody_asks_for_is_named(tiny_random, make_fp8):
    path, _ = make_fp8(tiny_random("llama"), "tensor", TENSOR, static=static_scale)
    with pytest.raises(CheckpointError, match=r"takes the tensor .*input_scale"):
        load(path)


def test_modules_that_are_not_converted_stay_wide(tiny_random, make_fp8, reference, driver):
    config = TENSOR | {"modules_to_not_convert": ["lm_head", "model.layers.1", "down_proj"]}
    narrow, wide = make_fp8(tiny_random("llama"), "tensor", config, kept=("layers.1.", "down_proj"))
    layers = driver(narrow).decoder.layers
    assert [layer.attention.qkv.fp8 is not None for layer in layers] == [True, False, True]
    assert [layer.mlp.gate_up.fp8 is not None for layer in layers] == [True, False, True]
    assert [layer.mlp.down.fp8 is not None for layer in layers] == [False] * 3
    wanted = logits_of(round_inputs(reference(wide), lambda x, name: x))
    assert (driver(narrow).prefill(PROMPT, 16) - wanted).abs().mean() < 0.1


def test_a_module_in_fp8_that_should_not_be_is_named(tiny_random, make_fp8):
    config = TENSOR | {"modules_to_not_convert": ["self_attn.q_proj"]}
    path, _ = make_fp8(tiny_random("llama"), "tensor", config)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has dtype F8_E4M3.*not converted"):
        load(path)


def test_half_a_fused_projection_in_fp8_is_named(tiny_random, make_fp8):
    path, _ = make_fp8(tiny_random("llama"), "tensor", TENSOR, kept=("k_proj",))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight is not in FP8 while .*q_proj"):
        load(path)


def test_fp8_tensors_without_a_word_about_them_are_refused(tiny_random, make_fp8, edited):
    path, _ = make_fp8(tiny_random("llama"), "tensor", TENSOR)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has dtype F8_E4M3.*names no FP8"):
        load(edited(path, config=lambda c: c.pop("quantization_config")))


def test_an_output_head_may_be_in_fp8(tiny_random, make_fp8, driver):
    path, _ = make_fp8(tiny_random("llama"), "tensor", compressed("tensor", ignore=[]))
    whole = driver(path).prefill(PROMPT, 16)

    def narrow_head(tensors):
        head = tensors["lm_head.weight"]
        tensors["lm_head.weight_scale"] = scale = head.abs().amax(1, keepdim=True) / 448
        tensors["lm_head.weight"] = (head / scale).to(torch.float8_e4m3fn)

    change(path, narrow_head)
    narrow = driver(path).prefill(PROMPT, 16)
    assert 0 < (narrow - whole).abs().mean() < 0.05 * whole.abs().mean()


@pytest.mark.parametrize("quantization", ["int8", "fp8_block"])
def test_another_quantisation_than_the_checkpoints_is_refused(tiny_random, make_fp8, quantization):
    path, _ = make_fp8(tiny_random("llama"), "tensor", TENSOR)
    with pytest.raises(ConfigError, match="checkpoint that is in FP8"):
        load(path, quantization=quantization)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_wide_checkpoint_is_rounded_while_it_is_read(
    tiny_random, reference, driver, monkeypatch, family, quantization
):
    path = tiny_random(family)
    exact = logits_of(reference(path))
    spec = read_spec(path)
    rounded = load_decoder(path, spec, dtype=torch.float32, device="cpu", quantization=quantization)
    run = driver(path)
    run.decoder = rounded
    assert rounded.layers[0].attention.qkv.data.dtype == torch.float8_e4m3fn
    assert rounded.lm_head.fp8 is None
    error = (run.prefill(PROMPT, 16) - exact).norm() / exact.norm()
    assert 0.005 < error < 0.3
    monkeypatch.setattr(PackedWeight, "rounding", None)
    monkeypatch.setattr(fp8, "rounded_inputs", lambda x, scales: x.float())
    weights_only = (run.prefill(PROMPT, 16) - exact).norm() / exact.norm()
    assert 0.005 < weights_only < error


@pytest.mark.parametrize(
    ("change_", "message"),
    [
        ({"quant_method": "gptq"}, "'gptq' are not supported; use .* by fp8 or compressed-tensors"),
        (BLOCK | {"weight_block_size": [64, 128]}, "weight_block_size = .64, 128. is not"),
        (BLOCK | {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        (BLOCK | {"scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0' is not supported"),
        (TENSOR | {"activation_scheme": "other"}, "must be dynamic or static, got 'other'"),
        (TENSOR | {"rotation": "hadamard"}, "rotation = 'hadamard' is not known"),
        (compressed("tensor", format="pack-quantized"), "format = 'pack-quantized'"),
        (compressed("group"), "strategy = 'group' is not supported"),
        (compressed("tensor", config_groups={}), "config_groups must hold one scheme, has 0"),
        (compressed("channel", inputs_in_fp8("group", dynamic=True, group_size=64)), "group_size"),
        (compressed("tensor", {"num_bits": 4, "type": "float"}), "symmetric 8 bit floats"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change_, message):
    with pytest.raises(UnsupportedModel, match=message):
        read_quantization({"quantization_config": change_})


@pytest.mark.parametrize(
    ("pattern", "module", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", True),
        ("model.layers.*.mlp", "model.layers.4.mlp.up_proj", True),
        ("re:.*head", "model.layers.4.mlp.up_proj", False),
    ],
)
def test_a_pattern_ends_with_a_component_of_the_name(pattern, module, ignored):
    assert is_ignored(module, [pattern]) is ignored


def load(path, quantization=None):
    spec = read_spec(path)
    return load_decoder(path, spec, dtype=torch.float32, device="cpu", quantization=quantization)


def change(path, edit):
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_the_config_that_a_checkpoint_saves_is_read_through_json(tiny_random, make_fp8):
    path, _ = make_fp8(tiny_random("llama"), "block", BLOCK)
    fields = json.loads((path / "config.json").read_text())
    spec = read_spec(path)
    assert fields["quantization_config"]["weight_block_size"] == [128, 128]
    assert (spec.fp8.block, spec.fp8.activations) == ((128, 128), "group")


@pytest.mark.parametrize("where", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale"])
def test_scales_of_the_cache_come_from_the_checkpoint(tiny_random, make_fp8, driver, where):
    scheme = inputs_in_fp8("tensor", dynamic=False)
    config = compressed("tensor", kv_cache_scheme=scheme)
    path, _ = make_fp8(tiny_random("llama"), "tensor", config)
    names = [f"model.layers.{i}.{where.format(x)}" for i in range(3) for x in "kv"]
    change(path, lambda t: t.update({n: torch.tensor(0.1 + i) for i, n in enumerate(names)}))
    layers = driver(path).decoder.layers
    assert [layer.attention.kv_scales for layer in layers] == [
        pytest.approx((0.1 + 2 * i, 1.1 + 2 * i)) for i in range(3)
    ]
    change(path, lambda t: t.pop(names[1]))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_scale is missing"):
        load(path)


@pytest.fixture
def grouped(monkeypatch):
    """Experts are stacked as for a GPU, and computed by the reference."""
    monkeypatch.setattr(loader, "uses_triton", lambda _: True)
    pack = loader.pack_linear

    def plain(weight, bias=None, *, quantization=None):
        if quantization is not None:
            return pack(weight, bias, quantization=quantization)
        return PackedWeight(*weight.shape, weight.dtype, "plain", weight, bias)

    monkeypatch.setattr(loader, "pack_linear", plain)


@pytest.mark.usefixtures("grouped")
@pytest.mark.parametrize("form", ["wide", "tensor", "channel", "block"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_stacked_experts_are_those_of_transformers(
    tiny_random, make_fp8, reference, driver, family, form
):
    narrow = wide = tiny_random(family)
    if form != "wide":
        kept = ("mlp.gate.", "block_sparse_moe.gate.")
        narrow, wide = make_fp8(narrow, form, compressed(form), kept=kept)
    run = driver(narrow)
    mixtures = [layer.mlp for layer in run.decoder.layers if isinstance(layer.mlp, GroupedMoeMlp)]
    assert len(mixtures) == (2 if family == "qwen3_moe" else 3)
    assert (mixtures[0].gate_up.fp8 is None) == (form == "wide")
    assert_close(run.prefill(PROMPT, 16), logits_of(reference(wide)))


@pytest.mark.usefixtures("grouped")
def test_stacked_experts_may_have_static_scales_and_count_their_bytes(
    tiny_random, make_fp8, driver
):
    path, _ = make_fp8(
        tiny_random("mixtral"), "tensor", STATIC, kept=("moe.gate.",), static=static_scale
    )
    decoder = driver(path).decoder
    mlp = decoder.layers[0].mlp
    assert float(mlp.gate_up.fp8.input) == pytest.approx(0.02)
    sizes = [e.num_bytes for e in traffic_of(decoder).experts]
    scales = mlp.gate_up.fp8.num_bytes + mlp.down.fp8.num_bytes
    codes = mlp.gate_up.data.nbytes + mlp.down.data.nbytes
    assert sizes[0] == codes + scales + mlp.router.num_bytes


@pytest.mark.usefixtures("grouped")
def test_stacked_experts_take_new_weights_and_refuse_another_form(
    tiny_random, make_fp8, driver, reference
):
    run = driver(tiny_random("mixtral"))
    with pytest.raises(CheckpointError, match="kept as"):
        WeightUpdate(run.decoder, tiny_random("mixtral"), "fp8")
    narrow, wide = make_fp8(tiny_random("mixtral"), "tensor", TENSOR, kept=("moe.gate.",))
    with pytest.raises(CheckpointError, match=r"gate_up: .* kept as fp8 experts \(5, 160, 96\)"):
        _check_form(run.decoder.layers[0].mlp, driver(narrow).decoder.layers[0].mlp)
    WeightUpdate(run.decoder, wide, None).write()
    assert_close(run.prefill(PROMPT, 16), logits_of(reference(wide)))
