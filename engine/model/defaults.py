"""The fields of config.json that each family reads, with the values of a config that omits them.

They are those of transformers' config classes (a test compares every one). A name that stands here
is understood by the family's reader; None means "derived from the others" or "off".
"""

from typing import Any

# sizes that a config must give; a default would only hide that the file is not a model's
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
_BIASES: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
_SWITCHED_WINDOW: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN: dict[str, Any] = {
    **_COMMON,
    **_SWITCHED_WINDOW,
    "num_key_value_heads": 32,
    "layer_types": None,
}
_GEMMA: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_OLMO: dict[str, Any] = {
    **_COMMON,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, **_BIASES, "eos_token_id": 2},
    "mistral": {
        **_COMMON,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "qwen3_moe": {
        **_COMMON,
        **_SWITCHED_WINDOW,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "num_experts": 128,
        "num_local_experts": None,  # the same field in newer files
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    "mixtral": {
        **_COMMON,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts": None,  # the same field in newer files
        "num_experts_per_tok": 2,
    },
    "smollm3": {
        **_COMMON,
        **_BIASES,
        **_SWITCHED_WINDOW,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    "gemma2": {**_GEMMA, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {
        **_GEMMA,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": None,
    },
    "phi3": {
        **_COMMON,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        "sliding_window": None,
        "original_max_position_embeddings": 4096,
    },
    "olmo2": _OLMO,
    "olmo3": {**_OLMO, "sliding_window": 4096, "layer_types": None},
    "granite": {
        **_COMMON,
        **_BIASES,
        "eos_token_id": 2,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
}
_EVERYWHERE = (
    *REQUIRED,
    "model_type",
    "architectures",
    "dtype",
    "torch_dtype",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
)


def is_known(model_type: str, name: str) -> bool:
    """Whether the family's reader understands this field of config.json."""
    return name in DEFAULTS[model_type] or name in _EVERYWHERE
