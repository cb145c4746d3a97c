"""config.json to ModelSpec: what is read, and what is refused by name."""

import json

import pytest
import torch

from tokenfleet.engine.errors import CheckpointError, ConfigError, UnsupportedModel
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.rope import cos_sin_table, read_rope

THETA = {"rope_theta": 10000.0}
ORIGINAL = {"original_max_position_embeddings": 256}


@pytest.fixture
def with_config(tiny_random, edited):
    """with_config(family, **fields) -> the family's tiny checkpoint with these fields set."""
    return lambda family, **fields: edited(tiny_random(family), config=lambda c: c.update(fields))


@pytest.mark.parametrize("model_type", ["gpt2", "mamba", "Llama", "", None, 3])
def test_an_unknown_model_type_is_refused_with_the_list_of_known_ones(with_config, model_type):
    with pytest.raises(UnsupportedModel, match=rf"model_type {model_type!r} .*granite, llama"):
        read_spec(with_config("llama", model_type=model_type))


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaModel"])
def test_an_architecture_that_generates_nothing_is_refused(with_config, name):
    with pytest.raises(UnsupportedModel, match=name):
        read_spec(with_config("llama", architectures=[name]))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "clip_qkv", 8.0),
        ("llama", "rope_interleaved", True),
        ("llama", "sliding_window", 16),
        ("mistral", "attention_bias", True),
        ("phi3", "attention_bias", True),
        ("phi3", "full_attn_mod", 2),
        ("qwen2", "use_mrope", True),
        ("qwen3", "mlp_bias", True),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("olmo2", "clip_qkv", 4.0),
        ("granite", "sliding_window", 8),
        ("mixtral", "shared_expert_intermediate_size", 64),
        ("smollm3", "some_new_scale", 0.5),
    ],
)
def test_a_field_that_may_change_the_maths_is_refused_by_name(with_config, family, field, value):
    with pytest.raises(UnsupportedModel, match=f"{field} = .* '{family}'"):
        read_spec(with_config(family, **{field: value}))


def test_a_quantised_checkpoint_is_refused_naming_its_method(with_config):
    path = with_config("llama", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModel, match="'gptq' are not supported; use the checkpoint in"):
        read_spec(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization_config", None),
        ("clip_qkv", None),
        ("use_mrope", False),
        ("rope_interleaved", False),
        ("is_llama_config", True),
        ("transformers.js_config", {"dtype": "q4"}),
        ("_name_or_path", "somewhere"),
        ("temperature", 0.6),
        ("interpolate_factor", 1),
    ],
)
def test_a_field_that_is_off_or_harmless_is_no_reason_to_refuse(with_config, field, value):
    assert read_spec(with_config("llama", **{field: value})).model_type == "llama"


@pytest.mark.parametrize("act", ["gelu", "relu", "silu_and_mul"])
def test_an_unknown_activation_is_refused(with_config, act):
    with pytest.raises(UnsupportedModel, match=act):
        read_spec(with_config("llama", hidden_act=act))


def test_an_unknown_layer_type_is_refused(with_config):
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        read_spec(with_config("qwen3", layer_types=kinds))


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8"])
def test_an_unknown_dtype_is_refused(with_config, dtype):
    with pytest.raises(UnsupportedModel, match=dtype):
        read_spec(with_config("llama", dtype=dtype))


def test_a_softcap_that_transformers_would_ignore_is_refused(with_config):
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping"):
        read_spec(with_config("gemma3_text", attn_logit_softcapping=30.0))


@pytest.mark.parametrize("rope_type", ["proportional", "axial", "mrope", "ntk"])
def test_an_unknown_rope_type_is_refused_with_the_list_of_known_ones(with_config, rope_type):
    rope = {"rope_type": rope_type, **THETA}
    with pytest.raises(UnsupportedModel, match=f"'{rope_type}' .*default, dynamic.*yarn"):
        read_spec(with_config("llama", rope_parameters=rope))


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_type": "default", **THETA, "mrope_section": [4, 6, 6]}, "mrope_section"),
        ({"rope_type": "linear", "factor": 2.0, **THETA, "beta_fast": 32}, "beta_fast"),
        ({"rope_type": "default", **THETA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_a_rope_parameter_without_meaning_is_refused(with_config, rope, name):
    with pytest.raises(UnsupportedModel, match=name):
        read_spec(with_config("llama", rope_parameters=rope))


def test_longrope_factors_of_the_wrong_length_are_refused(with_config):
    rope = {"rope_type": "longrope", **THETA, "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}
    with pytest.raises(UnsupportedModel, match=r"short_factor|longrope"):
        read_spec(with_config("phi3", rope_parameters=rope))


@pytest.mark.parametrize("damage", ["absent", "no json", "a list"])
def test_a_config_that_cannot_be_read_is_a_checkpoint_error(edited, tiny_random, damage):
    path = edited(tiny_random("llama"))
    file = path / "config.json"
    match damage:
        case "absent":
            file.unlink()
        case "no json":
            file.write_text("{")
        case "a list":
            file.write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_spec(path)


def test_a_directory_that_is_not_there_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="must be a directory"):
        read_spec(tmp_path / "nowhere")


def test_query_heads_must_be_a_multiple_of_kv_heads(with_config):
    with pytest.raises(UnsupportedModel, match=r"9 .*num_key_value_heads = 4"):
        read_spec(with_config("llama", num_key_value_heads=4))


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": 5}, 257, (5,)),
        ({"eos_token_id": [5, 9]}, 257, (5, 9)),
        ({}, 257, (257,)),
        ({"eos_token_id": None}, [1, 2], (1, 2)),
        (None, 257, (257,)),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(with_config, generation, config, wanted):
    path = with_config("llama", eos_token_id=config)
    (path / "generation_config.json").unlink()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert read_spec(path).eos_token_ids == wanted


def test_a_damaged_generation_config_is_named(with_config):
    path = with_config("llama")
    (path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_spec(path)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_max_model_len_ends_where_the_positions_do(with_config, rope, longest):
    path = with_config("llama", rope_parameters={**rope, **THETA})
    assert read_spec(path).max_model_len == 256
    assert read_spec(path, max_model_len=longest).max_model_len == longest
    for wrong in (longest + 1, 0):
        with pytest.raises(ConfigError, match=f"between 1 and {longest} .* got {wrong}"):
            read_spec(path, max_model_len=wrong)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2,
         "attention_factor": 0.9, **ORIGINAL},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5,
         "truncate": False, **ORIGINAL},
        {"rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(32)],
         "long_factor": [2.0 + i / 4 for i in range(32)], **ORIGINAL},
        {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
         "factor": 3.0, "attention_factor": 1.25, **ORIGINAL},
    ],
)  # fmt: skip
@pytest.mark.parametrize("theta", [10000.0, 1000000.0, 500000])
def test_frequencies_are_transformers_to_the_last_bit(rope, theta):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**rope, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=1024,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    for length in (200, 1024):
        ours = read_rope(
            parameters, head_dim=64, partial=False, max_position=1024, max_model_len=length
        )
        theirs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)
        assert torch.equal(torch.tensor(ours.inv_freq), theirs)
        assert ours.attention_factor == factor


def test_a_layer_without_positions_turns_nothing():
    table = cos_sin_table(None, 5, torch.device("cpu"))
    assert torch.equal(table, torch.tensor([[1.0, 0.0]]).expand(5, 2))


def test_a_spec_is_a_value(tiny_random):
    first, second = read_spec(tiny_random("llama")), read_spec(tiny_random("llama"))
    assert first == second
    assert hash(first) == hash(second)
