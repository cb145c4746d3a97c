"""Fields of config.json that leave a forward pass as it is.

A name stands here only when no value of it changes a logit; a field that is merely switched off
needs no entry, because off is recognised by its value.
"""

from typing import Any

_TRAINING = """
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop output_router_logits
    router_aux_loss_coef router_jitter_noise use_bfloat16 gradient_checkpointing
"""
_PYTHON = """
    use_cache return_dict output_attentions output_hidden_states torchscript auto_map
    cache_implementation chunk_size_feed_forward attn_implementation transformers_version
    transformers.js_config pretraining_tp is_llama_config unsloth_version unsloth_fixed
"""
_TEXT = """
    bos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id prefix
    tokenizer_class model_max_length max_sequence_length dummy_token_index
"""
_TASKS = """
    id2label label2id num_labels problem_type task_specific_params finetuning_task
"""
_SAMPLING = """
    do_sample temperature top_k top_p typical_p num_beams num_beam_groups repetition_penalty
    length_penalty max_length min_length max_new_tokens num_return_sequences diversity_penalty
    encoder_no_repeat_ngram_size no_repeat_ngram_size
"""
_NEUTRAL = frozenset(f"{_TRAINING} {_PYTHON} {_TEXT} {_TASKS} {_SAMPLING}".split())

# fields of other families' maths whose value says "as usual"
_NEUTRAL_VALUES: dict[str, Any] = {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "expert_interval": 1,
}


def is_neutral(name: str, value: Any) -> bool:
    """Whether this field with this value changes nothing: private, known to be harmless, or off."""
    off = value is None or value is False or value == 0 or value in ("", [], {})
    return off or name.startswith("_") or name in _NEUTRAL or _NEUTRAL_VALUES.get(name) == value
