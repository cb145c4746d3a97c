"""What is read from a config.json is what transformers' config classes hold."""

import json
import math
from typing import Any

import pytest

from tokenfleet.engine.errors import CheckpointError, EngineError, UnsupportedModel
from tokenfleet.engine.model.config_file import resolve
from tokenfleet.engine.model.defaults import DEFAULTS, REQUIRED
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.field_kinds import KINDS

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 30,
    "num_attention_heads": 32, "max_position_embeddings": 512,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
# what the class replaces by a rule; the rule is compared through the layers of the spec
DERIVED = {"layer_types", "mlp_only_layers", "no_rope_layers", "head_dim", "num_key_value_heads",
           "sliding_window_pattern", "rope_local_base_freq", "num_experts", "num_local_experts",
           "max_window_layers", "sliding_window"}  # fmt: skip
ROPES = {
    "theta in the file": {"rope_theta": 1234.0},
    "rope_scaling": {"rope_theta": 1234.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "rope_scaling by type": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
}


def theirs(fields):
    from transformers import AutoConfig

    return AutoConfig.for_model(**fields)


def written(path, fields):
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("family", DEFAULTS)
def test_an_omitted_field_has_the_value_of_transformers_class(family):
    config = theirs({"model_type": family, **SIZES})
    ours = resolve({"model_type": family, **SIZES})
    for name in DEFAULTS[family]:
        if name not in DERIVED:
            assert getattr(ours, name) == getattr(config, name, DEFAULTS[family][name]), name


@pytest.mark.parametrize("family", DEFAULTS)
@pytest.mark.parametrize("switches", [{}, {"use_sliding_window": True, "sliding_window": 16}])
def test_layers_of_a_sparse_config_are_those_of_transformers(family, switches, tmp_path):
    if switches and "use_sliding_window" not in DEFAULTS[family]:
        switches = {}
    fields = {"model_type": family, **SIZES, **switches}
    config, spec = theirs(fields), read_spec(written(tmp_path, fields))
    everywhere = config.sliding_window if hasattr(config, "sliding_window") else None
    kinds = getattr(config, "layer_types", None) or [SLIDING if everywhere else FULL] * 30
    windows = [config.sliding_window if kind == SLIDING else None for kind in kinds]
    assert [layer.window for layer in spec.layers] == windows
    assert spec.num_kv_heads == config.num_key_value_heads
    assert spec.head_dim == (getattr(config, "head_dim", None) or 8)
    assert spec.vocab_size == 512
    turns = getattr(config, "no_rope_layers", [1] * 30)
    assert [layer.rope is not None for layer in spec.layers] == [bool(t) for t in turns]
    experts = getattr(config, "num_local_experts", None)
    assert [layer.moe.num_experts if layer.moe else None for layer in spec.layers] == [experts] * 30


@pytest.mark.parametrize(
    ("family", "spelling"),
    [
        (family, spelling)
        for family in DEFAULTS
        for spelling in ROPES
        if family != "phi3"  # knows only longrope: below
        # transformers overlooks the older word in these two; here it means what it says
        and not (family in ("gemma3_text", "olmo3") and spelling == "rope_scaling by type")
    ],
)
def test_rope_parameters_mean_what_they_mean_to_transformers(family, spelling, tmp_path):
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {"model_type": family, **SIZES, **ROPES[spelling], "head_dim": 32}
    config, spec = theirs(json.loads(json.dumps(fields))), read_spec(written(tmp_path, fields))
    nested = SLIDING in config.rope_parameters
    for index, kind in enumerate([FULL, SLIDING] if nested else [None]):
        parameters = config.rope_parameters[kind] if nested else config.rope_parameters
        rope = spec.ropes[index]
        assert rope.kind == parameters["rope_type"]
        if rope.kind == "default":
            powers = torch.arange(0, 32, 2, dtype=torch.float) / 32
            wanted, factor = 1.0 / parameters["rope_theta"] ** powers, 1.0
        else:
            rule = ROPE_INIT_FUNCTIONS[rope.kind]
            wanted, factor = rule(config, layer_type=kind)
        assert torch.equal(torch.tensor(rope.inv_freq), wanted)
        assert rope.attention_factor == factor


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_phi3_calls_longrope_by_three_names(kind, tmp_path):
    factors = {"short_factor": [1.5] * 4, "long_factor": [4.0] * 4}
    fields = {
        "model_type": "phi3", **SIZES, "rope_scaling": {"type": kind, **factors},
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    rope = read_spec(written(tmp_path, fields)).ropes[0]
    assert rope.kind == "longrope"
    assert rope.inv_freq[0] == pytest.approx(1 / 4.0)
    assert rope.attention_factor == pytest.approx(1.1338934)


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("value", ["absent", None, 0, -1, 1.5, "12", True])
def test_a_size_that_is_missing_or_no_size_is_named(name, value, tmp_path):
    fields = {"model_type": "llama", **SIZES, name: value}
    if value == "absent":
        del fields[name]
    with pytest.raises(CheckpointError, match=f"{name} must be a positive integer"):
        read_spec(written(tmp_path, fields))


ODD: list[Any] = [
    *("", "abc", -1, 0, 1.5, True, 10**400, math.nan, 1e300, 2**40),
    *([], {}, ["a"], [0], [None], {"a": 1}),
]


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_field_of_any_value_is_read_or_refused(family, tmp_path):
    fields = {"model_type": family, **SIZES}
    for name in {**DEFAULTS[family], **KINDS, **dict.fromkeys(fields)}:
        for value in [None, *ODD]:
            path = written(tmp_path, {**fields, name: value})
            try:
                spec = read_spec(path)
            except EngineError as refusal:
                assert name in str(refusal) or isinstance(refusal, UnsupportedModel)  # noqa: PT017
            else:
                assert all(math.isfinite(f) for rope in spec.ropes for f in rope.inv_freq)


def test_every_field_that_is_read_has_a_kind():
    read = {name for defaults in DEFAULTS.values() for name in defaults}
    assert read - set(KINDS) == {"eos_token_id"}  # which eos_token_ids checks


def test_more_experts_a_token_than_there_are_is_refused(tmp_path):
    fields = {"model_type": "mixtral", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 3}
    with pytest.raises(UnsupportedModel, match=r"num_experts_per_tok = 3 .* 2 experts"):
        read_spec(written(tmp_path, fields))


def test_reading_a_config_imports_no_transformers(tiny_random):
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path\n"
        "from tokenfleet.engine.model.families import read_spec\n"
        "read_spec(Path(sys.argv[1])); assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_random("llama"))], check=True)
