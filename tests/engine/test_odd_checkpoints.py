"""Files beside the weights that are not what they should be: named, or harmless."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.engine import CheckpointError, Engine, EngineConfig, SamplingParams
from tokenfleet.engine.errors import EngineError
from tokenfleet.engine.text import TextCodec


def start(path: Path) -> Engine:
    return Engine(
        EngineConfig(path, dtype="float32", device="cpu", max_num_seqs=4, num_blocks=32,
                     max_num_batched_tokens=64)
    )  # fmt: skip


@pytest.fixture
def copied(tiny_random: Any, tmp_path: Path) -> Callable[..., Path]:
    """copied(file=content) -> a llama's checkpoint with files replaced; a dict is merged."""

    def make(**files: Any) -> Path:
        path = tmp_path / "model"
        shutil.copytree(tiny_random("llama"), path)
        for name, content in files.items():
            file = path / f"{name}.json"
            if isinstance(content, dict):
                content = json.dumps({**json.loads(file.read_text()), **content})
            file.write_text(content)
        return path

    return make


def test_end_tokens_that_the_vocabulary_lacks_never_come_and_harm_nothing(tiny_random: Any) -> None:
    engine = start(tiny_random("llama", eos_token_ids=(257, 99_999, -1)))
    assert engine.core.spec.eos_token_ids == (257,)
    least = SamplingParams(max_tokens=4, min_tokens=3, seed=1)
    shaped = SamplingParams(max_tokens=8, structured_outputs={"regex": "ab"})
    first, second = engine.generate([[1, 2], [1, 2]], [least, shaped])
    assert (first.error, second.error) == (None, None)
    assert second.text == "ab"


@pytest.mark.parametrize("file", ["generation_config", "config"])
@pytest.mark.parametrize("eos", ["</s>", ["</s>"], 257.0, True, [257, None], {"id": 257}])
def test_an_end_token_that_is_no_id_is_refused_by_its_file(
    copied: Any, file: str, eos: object
) -> None:
    path = copied(**{"generation_config": {"eos_token_id": None}, file: {"eos_token_id": eos}})
    with pytest.raises(CheckpointError, match=f"{file}.json: eos_token_id must be"):
        start(path)


@pytest.mark.parametrize("content", ["[" * 100_000, "{", "", "[]"], ids=["deep", "cut", "", "list"])
@pytest.mark.parametrize("file", ["config", "generation_config", "tokenizer_config"])
def test_a_file_that_holds_no_object_is_named(copied: Any, file: str, content: str) -> None:
    with pytest.raises(CheckpointError, match=f"/{file}.json "):
        start(copied(**{file: content}))


@pytest.mark.parametrize(
    "value",
    [
        *("fp8", 8, ["fp8"], {"quant_method": ["fp8"]}),
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": 8}}},
    ],
)
def test_a_quantization_that_says_nothing_known_is_refused(copied: Any, value: object) -> None:
    with pytest.raises(EngineError, match="quantization_config"):
        start(copied(config={"quantization_config": value}))


@pytest.mark.parametrize("templates", [["a"], [{"name": "x"}], [{"template": "x"}], {"a": 1}, 5])
def test_chat_templates_of_another_form_are_none(copied: Any, templates: object) -> None:
    path = copied(tokenizer_config={"chat_template": templates})
    (path / "chat_template.jinja").unlink()
    assert TextCodec.load(path).chat_template is None


def test_weights_that_are_a_link_to_nowhere_are_named(copied: Any) -> None:
    weights = copied() / "model.safetensors"
    weights.unlink()
    weights.symlink_to("/nowhere/blob")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        start(weights.parent)
