"""Shapes, biases, ties, rotary rules and dtypes: each against transformers in float32."""

import pytest
import torch

from tokenfleet.engine.errors import ConfigError
from tokenfleet.engine.model.families import read_spec

PROMPT = torch.randint(0, 256, (29,), generator=torch.Generator().manual_seed(8)).tolist()
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        "rope_theta": 10000.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [2.0 + 0.3 * i for i in range(16)]}  # fmt: skip


def assert_equal_logits(path, reference, driver, prompt=PROMPT, chunk=16, **options):
    model = reference(path)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0]
    actual = driver(path, **options).prefill(prompt, chunk)
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "head_dim"),
    [("llama", 80), ("llama", 96), ("llama", 256), ("qwen3", 80), ("gemma2", 256), ("mistral", 10)],
)
def test_head_sizes_that_are_not_hidden_by_heads(tiny_random, reference, driver, family, head_dim):
    assert_equal_logits(tiny_random(family, head_dim=head_dim), reference, driver)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(12, 2), (9, 3), (6, 6), (8, 1)])
def test_head_ratios(tiny_random, reference, driver, q_heads, kv_heads):
    path = tiny_random(
        "mistral", num_attention_heads=q_heads, num_key_value_heads=kv_heads, hidden_size=96
    )
    assert_equal_logits(path, reference, driver)


@pytest.mark.parametrize("head_dim", ["absent", "null"])
def test_a_head_size_that_is_not_given_is_hidden_by_heads(
    tiny_random, reference, driver, edited, head_dim
):
    def edit(config):
        del config["head_dim"]
        if head_dim == "null":
            config["head_dim"] = None

    path = edited(tiny_random("mistral", hidden_size=288, head_dim=32), config=edit)
    assert read_spec(path).head_dim == 32
    assert_equal_logits(path, reference, driver)


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", {"attention_bias": True}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}),
        ("gemma2", {"attention_bias": True}),
        ("gemma3_text", {"attention_bias": True}),
        ("olmo2", {"attention_bias": True}),
        ("olmo3", {"attention_bias": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_biases_that_are_on(tiny_random, reference, driver, family, biases):
    assert_equal_logits(tiny_random(family, **biases), reference, driver)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "granite"])
def test_tied_and_untied_output_heads(tiny_random, reference, driver, family, tied):
    path = tiny_random(family, tie_word_embeddings=tied)
    assert read_spec(path).tie_embeddings is tied
    assert_equal_logits(path, reference, driver)


@pytest.mark.parametrize("vocab_size", [261, 320])
def test_odd_vocabularies(tiny_random, reference, driver, vocab_size):
    path = tiny_random("llama", vocab_size=vocab_size)
    assert_equal_logits(path, reference, driver)


@pytest.mark.parametrize(
    ("family", "window"),
    [("mistral", 1), ("mistral", 5), ("mistral", None), ("mixtral", 6), ("phi3", 7)],
)
def test_one_window_for_all_layers(tiny_random, reference, driver, family, window):
    path = tiny_random(family, sliding_window=window)
    if window is None:  # the class's default is a number
        assert read_spec(path).layers[0].window == 4096
    assert_equal_logits(path, reference, driver, chunk=3)


def test_windows_that_are_switched_off_are_not_applied(tiny_random, reference, driver):
    path = tiny_random("qwen2", use_sliding_window=False, sliding_window=4)
    assert {layer.window for layer in read_spec(path).layers} == {None}
    assert_equal_logits(path, reference, driver)


def test_smollm3_layers_without_positions_may_slide(tiny_random, reference, driver):
    path = tiny_random("smollm3", use_sliding_window=True, sliding_window=6)
    assert [layer.window for layer in read_spec(path).layers] == [None, 6, None]
    assert_equal_logits(path, reference, driver)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3])
def test_routing(tiny_random, reference, driver, top_k, renormalize):
    path = tiny_random("qwen3_moe", num_experts_per_tok=top_k, norm_topk_prob=renormalize)
    assert_equal_logits(path, reference, driver, chunk=3)


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3,
        {**YARN, "beta_fast": 16, "beta_slow": 2},
        LINEAR,
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    ],
    ids=["llama3", "yarn", "linear", "dynamic"],
)
def test_rope_rules(tiny_random, reference, driver, rope):
    prompt = (PROMPT * 4)[:90]
    path = tiny_random("mistral", rope_parameters=rope, num_hidden_layers=2)
    assert_equal_logits(path, reference, driver, prompt=prompt, chunk=32)


def test_dynamic_rope_beyond_the_trained_length_uses_one_base_for_the_engine(
    tiny_random, reference, driver
):
    prompt = (PROMPT * 4)[:100]
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = tiny_random("llama", rope_parameters=rope, max_position_embeddings=64)
    assert_equal_logits(path, reference, driver, prompt=prompt, chunk=16, max_model_len=100)


@pytest.mark.parametrize(("length", "rule"), [(40, "short_factor"), (100, "long_factor")])
def test_longrope_takes_one_set_of_factors_by_max_model_len(
    tiny_random, reference, driver, length, rule
):
    prompt = (PROMPT * 4)[:length]
    path = tiny_random(
        "phi3", rope_parameters=LONG, max_position_embeddings=128,
        original_max_position_embeddings=64,
    )  # fmt: skip
    assert_equal_logits(path, reference, driver, prompt=prompt, max_model_len=length)
    frequencies = read_spec(path, max_model_len=length).ropes[0].inv_freq
    assert frequencies[0] == pytest.approx(1 / LONG[rule][0])


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_partial_rotary(tiny_random, reference, driver, share):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    path = tiny_random("phi3", rope_parameters=rope)
    assert read_spec(path).ropes[0].rotary_dim == 32 * share
    assert_equal_logits(path, reference, driver)


def test_phi_4_is_the_older_phis_architecture_with_other_numbers(tiny_random, reference, driver):
    """Phi-4-mini: three quarters rotated, two sets of factors, tied. Phi-4: none of these."""
    factors = {name: LONG[name][:12] for name in ("short_factor", "long_factor")}
    mini = tiny_random(
        "phi3", hidden_size=192, num_attention_heads=6, num_key_value_heads=2,
        rope_parameters={**LONG, **factors, "partial_rotary_factor": 0.75},
        max_position_embeddings=128, original_max_position_embeddings=64,
        tie_word_embeddings=True, sliding_window=262_144,
    )  # fmt: skip
    assert read_spec(mini).ropes[0].rotary_dim == 24
    assert_equal_logits(mini, reference, driver, max_model_len=60)
    whole = tiny_random("phi3", sliding_window=None, tie_word_embeddings=False, rms_norm_eps=1e-5)
    assert_equal_logits(whole, reference, driver)


@pytest.mark.parametrize("scaling", ["rope_scaling", "rope_scaling with type", "theta alone"])
def test_the_older_spelling_of_rope_settings(tiny_random, reference, driver, edited, scaling):
    def edit(config):
        del config["rope_parameters"]
        config["rope_theta"] = 2000.0
        kind = "type" if scaling.endswith("type") else "rope_type"
        if scaling != "theta alone":
            config["rope_scaling"] = {kind: "linear", "factor": 3.0}

    path = edited(tiny_random("llama"), config=edit)
    spec = read_spec(path)
    assert spec.ropes[0].kind == ("default" if scaling == "theta alone" else "linear")
    assert_equal_logits(path, reference, driver)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_checkpoints_widen_exactly(tiny_random, reference, driver, dtype):
    path = tiny_random("llama", dtype=dtype)
    assert read_spec(path).dtype == dtype
    assert_equal_logits(path, reference, driver)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "olmo2", "qwen3_moe"])
def test_a_narrow_run_stays_near_the_wide_one(tiny_random, driver, family, dtype):
    path = tiny_random(family, num_experts_per_tok=7 if family == "qwen3_moe" else None)
    narrow = driver(path, dtype=dtype)
    wide = driver(path).prefill(PROMPT, 16)
    logits = narrow.prefill(PROMPT, 16)
    assert narrow.decoder.dtype == dtype
    assert narrow.pools[0].k.dtype == dtype
    assert logits.dtype == torch.float32
    limit = 0.06 if dtype == torch.bfloat16 else 0.01
    assert (logits - wide).norm() / wide.norm() < limit


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_float16_is_refused_where_activations_leave_its_range(tiny_random, driver, family):
    with pytest.raises(ConfigError, match=f"float16 .* {family}; use bfloat16 or float32"):
        driver(tiny_random(family), dtype=torch.float16)


def test_a_block_costs_what_its_pools_hold(tiny_random, driver):
    decoder = driver(tiny_random("gemma2"), dtype=torch.bfloat16).decoder
    pools = decoder.make_pools(10, 16)
    total = sum(pool.k.nbytes + pool.v.nbytes for pool in pools)
    assert decoder.kv_bytes_per_block(16) == total // 10


@pytest.mark.smollm2
def test_smollm2_follows_transformers_over_a_chat_prompt(reference, driver):
    from transformers import AutoTokenizer

    from tokenfleet.worker.demo.model import prepare_smollm2

    path = prepare_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path)
    turns = [{"role": "user", "content": "Write 3 short lines about the sea in 1999."}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        wanted = reference(path)(torch.tensor([ids])).logits[0]
    actual = driver(path, max_model_len=128).prefill(ids, 16)
    assert torch.equal(actual.argmax(-1), wanted.argmax(-1))
    torch.testing.assert_close(actual, wanted, atol=5e-4, rtol=0)  # logits reach 30
