"""Checkpoints that a test can make in a tenth of a second, and a tokenizer of bytes.

tiny_random   real transformers classes with a small config and random weights: the reference is
              transformers itself
script_model  weights that are a table: greedy output follows a chosen chain of tokens
byte_tokenizer  ids 0-255 are bytes, then the specials, then merges that the test chose
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

# read when torch is imported: the models are too small for threads, and two test processes share
# the machine
os.environ.setdefault("OMP_NUM_THREADS", "1")

BOS, EOS, PAD = 256, 257, 258  # ids of <s>, </s>, <pad>
NUM_BASE_TOKENS = 259  # 256 bytes and the three specials
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\\n' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BASE: dict[str, Any] = {
    "vocab_size": NUM_BASE_TOKENS,
    "hidden_size": 144,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": _ROPE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_NESTED = {
    "sliding_attention": _ROPE,
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
}
_GEMMA: dict[str, Any] = {"sliding_window": 8, "query_pre_attn_scalar": 24, "layer_types": _MIXED}
_NO_HEAD_DIM: dict[str, Any] = {"hidden_size": 288, "head_dim": None}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "hidden_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"hidden_size": 96, "sliding_window": 8},
    "qwen2": {"hidden_size": 96, "use_sliding_window": True, "sliding_window": 8,
              "max_window_layers": 1},
    "qwen3": {"hidden_size": 96},
    "qwen3_moe": {**_EXPERTS, "num_experts": 7, "moe_intermediate_size": 24,
                  "norm_topk_prob": True, "mlp_only_layers": [1]},
    "mixtral": {**_EXPERTS, "num_local_experts": 5, "sliding_window": None},
    "smollm3": {"hidden_size": 288, "no_rope_layers": [1, 0, 1]},
    "gemma2": {**_GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    "gemma3_text": {**_GEMMA, "rope_parameters": _NESTED},
    "phi3": _NO_HEAD_DIM,
    "olmo2": _NO_HEAD_DIM,
    "olmo3": {**_NO_HEAD_DIM, "sliding_window": 8, "layer_types": _MIXED,
              "rope_parameters": _NESTED},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                "attention_multiplier": 0.2, "logits_scaling": 2.5},
}  # fmt: skip


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted SmolLM2-135M-Instruct (made on first use, then cached)."""
    from tokenfleet.worker.demo.model import prepare_smollm2

    return prepare_smollm2()


@pytest.fixture(scope="session")
def smollm2_engine(smollm2: Path) -> Any:
    """One engine for all that is asked of the real model in float32."""
    from tokenfleet.engine import Engine, EngineConfig

    return Engine(
        EngineConfig(smollm2, dtype="float32", device="cpu", max_num_seqs=64, max_model_len=2048,
                     num_blocks=512)
    )  # fmt: skip


@pytest.fixture(scope="session")
def families() -> list[str]:
    """Every model_type that tiny_random makes."""
    return list(FAMILIES)


@pytest.fixture(scope="session")
def tiny_random(tmp_path_factory) -> Callable[..., Path]:
    """tiny_random(family, dtype="float32", max_shard_size=None, eos_token_ids=EOS, **overrides).

    Returns a checkpoint directory (config, generation config, safetensors, byte tokenizer), made
    once a session for the same arguments; a test that damages it copies it first. A None among the
    overrides removes a key of the family's defaults.
    """
    made: dict[str, Path] = {}

    def make(
        family: str,
        *,
        dtype: str = "float32",
        max_shard_size: int | None = None,
        eos_token_ids: int | Sequence[int] = EOS,
        **overrides: Any,
    ) -> Path:
        key = repr((family, dtype, max_shard_size, eos_token_ids, sorted(overrides.items())))
        if key not in made:
            path = tmp_path_factory.mktemp(family)
            fields = {**_BASE, **FAMILIES[family], **overrides}
            fields = {name: value for name, value in fields.items() if value is not None}
            _save_random(path, family, fields, dtype, max_shard_size)
            _save_generation_config(path, eos_token_ids)
            _byte_tokenizer(()).save_pretrained(path)
            made[key] = path
        return made[key]

    return make


@pytest.fixture(scope="session")
def script_model(tmp_path_factory) -> Callable[..., Path]:
    """script_model(chain, merges=(), end=EOS) -> a checkpoint whose greedy output is `chain`.

    The chain starts after any prompt whose last token is not in it, and is followed by `end`. A
    token has one successor, so no token may stand in the chain twice; give text that repeats
    itself as merged tokens. `merges` are those of byte_tokenizer. Random sampling at temperature 1
    follows the chain as well: the next token leads by a logit of about 30.
    """

    def make(chain: Sequence[int], *, merges: Sequence[tuple[str, str]] = (), end: int = EOS):
        if len(set(chain)) != len(chain) or end in chain:
            raise ValueError(f"a token may stand in the chain only once, got {list(chain)}")
        path = tmp_path_factory.mktemp("script")
        vocab_size = NUM_BASE_TOKENS + len(merges)
        follows = dict(zip(chain, [*chain[1:], end], strict=True))
        _save_table(path, [follows.get(t, chain[0]) for t in range(vocab_size)])
        _save_generation_config(path, EOS)
        _byte_tokenizer(merges).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    """byte_tokenizer(merges=()) -> a fast tokenizer: id b is byte b; 256 <s>, 257 </s>, 258 <pad>.

    merges: pairs of texts, each naming two tokens that exist by then; the k-th makes id 259 + k.
    """
    return lambda merges=(): _byte_tokenizer(merges)


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Any]:
    """reference(path) -> transformers' model of a checkpoint, in float32."""
    loaded: dict[Path, Any] = {}

    def load(path: Path) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        _quieten_transformers()
        if path not in loaded:
            loaded[path] = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        return loaded[path]

    return load


def _save_random(
    path: Path, family: str, fields: Mapping[str, Any], dtype: str, max_shard_size: int | None
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _quieten_transformers()
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(_shaped(name, noise, parameter))
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(path, **({"max_shard_size": max_shard_size} if max_shard_size else {}))


def _quieten_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _shaped(name: str, noise: Any, parameter: Any) -> Any:
    """Noise at a scale that lets every part of the model show in the logits."""
    if name.endswith(".bias"):
        return noise * 0.2
    if "norm" in name:
        return parameter.detach().round() + noise * 0.2  # around 1, Gemma's around 0
    if "embed_tokens" in name:
        return noise * 0.5
    return noise * parameter.shape[-1] ** -0.5


def _save_table(path: Path, successor: Sequence[int]) -> None:
    """Llama whose layers add nothing: hidden is the last token, the head gives its successor."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = len(successor)
    width = -(-vocab_size // 4) * 4
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    _quieten_transformers()
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, width))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[torch.tensor(successor), torch.arange(vocab_size)] = 2.0
    model.save_pretrained(path)


def _save_generation_config(path: Path, eos: int | Sequence[int]) -> None:
    ids = eos if isinstance(eos, int) else list(eos)
    content = {"bos_token_id": BOS, "eos_token_id": ids, "pad_token_id": PAD}
    (path / "generation_config.json").write_text(json.dumps(content))


def _byte_tokenizer(merges: Sequence[tuple[str, str]]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = _byte_letters()
    pairs = [tuple("".join(letters[b] for b in part.encode()) for part in pair) for pair in merges]
    specials = {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    vocab = {letter: byte for byte, letter in enumerate(letters)} | specials
    for left, right in pairs:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_letters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]
