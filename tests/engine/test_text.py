"""Text comes out whole: no half characters, no stop strings, nothing lost."""

import itertools
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenfleet.engine import CheckpointError, InvalidRequest, SamplingParams
from tokenfleet.engine.detokenizer import WindowDetokenizer
from tokenfleet.engine.stops import StopMatcher
from tokenfleet.engine.text import TextCodec

TEXTS = [
    "Hello, world",
    " leading and trailing ",
    "\n\t  \n",
    "é naïve Ünïcödé e\u0301",
    "日本語と中文、한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽",
    "mixed 👩 日 é \u200d end",
]


def byte_level_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def fallback_tokenizer():
    pieces = [f"<0x{b:02X}>" for b in range(256)] + ["▁", "▁Hello", "H", "e", "l", "o", ",", "▁w"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return tokenizer


def word_tokenizer():
    words = ["hello", "##s", "world", "[UNK]"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def codec(tokenizer, **more):
    return TextCodec(tokenizer, **more)


def deltas(text_codec, ids, **params):
    stream = text_codec.stream(SamplingParams(max_tokens=None, **params))
    pieces = [stream.push([i]).text for i in ids]
    return [*pieces, stream.push([], ended=True).text]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_joined_are_the_text_and_none_ends_inside_a_character(text):
    byte_level = codec(byte_level_tokenizer())
    ids = byte_level.encode(text)
    pieces = deltas(byte_level, ids)
    assert "".join(pieces) == text == byte_level.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_joins_to_the_full_decode(text):
    fallback = codec(fallback_tokenizer())
    ids = [257, *text.encode(), 262, 263, *text.encode()]
    assert "".join(deltas(fallback, ids)) == fallback.decode(ids)


def test_first_space_of_a_sentencepiece_output_goes_and_later_ones_stay():
    fallback = codec(fallback_tokenizer())
    assert deltas(fallback, [257, 256, 263]) == ["Hello", " ", " w", ""]


def test_other_tokenizers_decode_through_a_window():
    words = codec(word_tokenizer())
    ids = [0, 1, 2, 2, 0]
    assert words._visible.style == "window"
    assert "".join(deltas(words, ids)) == words.decode(ids)


def test_a_window_that_never_becomes_a_character_is_let_out():
    tokenizer = byte_level_tokenizer()
    bad = tokenizer.token_to_id(sorted(pre_tokenizers.ByteLevel.alphabet())[-1])
    window = WindowDetokenizer(tokenizer, skip_special_tokens=True)
    pieces = [window.push(bad) for _ in range(50)]
    assert any(pieces)
    assert len(window._ids) < 20


@given(st.binary(max_size=40))
def test_invalid_bytes_become_replacement_characters_and_three_at_most_wait(data):
    fallback = codec(fallback_tokenizer())
    stream = fallback.stream(SamplingParams(max_tokens=None))
    seen = ""
    for i, byte in enumerate(data):
        seen += stream.push([byte]).text
        waiting = len(data[: i + 1].decode(errors="replace").removeprefix(" ")) - len(seen)
        assert waiting <= 3
    seen += stream.push([], ended=True).text
    assert seen == data.decode(errors="replace").removeprefix(" ")


def oracle(text, stops, include):
    """The text cut at the match that completes first, then the longest of those."""
    matches = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if not matches:
        return text, None
    end, _length, stop = min(matches)
    return (text[:end] if include else text[: end - len(stop)]), stop


@settings(max_examples=500)
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    cuts=st.sets(st.integers(0, 12)),
)
def test_stops_cut_the_same_text_however_it_is_split(text, stops, include, cuts):
    matcher = StopMatcher(stops, include=include)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown, stop = "", None
    for start, end in itertools.pairwise(borders):
        released = matcher.push(text[start:end])
        shown += released.text
        stop = released.stop
        if stop is not None:
            break
        unfinished = max(len(s) for s in stops) - 1
        assert end - len(shown) <= unfinished, "more is held back than a stop string needs"
    if stop is None:
        shown += matcher.flush()
    assert (shown, stop) == oracle(text, stops, include)


def test_a_stop_string_over_token_borders_never_leaks():
    byte_level = codec(byte_level_tokenizer())
    ids = byte_level.encode("The end.STOP and more")
    stream = byte_level.stream(SamplingParams(max_tokens=None, stop=["STOP"]))
    rng = random.Random(1)
    shown, used = "", 0
    while used < len(ids):
        size = rng.randrange(1, 6)
        delta = stream.push(ids[used : used + size])
        shown += delta.text
        used += delta.num_tokens
        if delta.stop:
            break
    assert (shown, delta.stop, used) == ("The end.", "STOP", len("The end.STOP"))


def test_stop_strings_wait_for_min_tokens():
    byte_level = codec(byte_level_tokenizer())
    ids = byte_level.encode("xSxxSx")
    stream = byte_level.stream(SamplingParams(max_tokens=None, stop=["S"], min_tokens=3))
    delta = stream.push(ids)
    assert (delta.text, delta.stop, delta.num_tokens) == ("xSxx", "S", 5)


def test_the_eos_token_is_never_part_of_the_text():
    tokenizer = byte_level_tokenizer()
    end = tokenizer.token_to_id("<end>")
    with_eos = codec(tokenizer, eos_token_ids=frozenset({end}))
    ids = [*with_eos.encode("ab"), end]
    for skip in (True, False):
        params = SamplingParams(max_tokens=None, skip_special_tokens=skip)
        assert with_eos.stream(params).push(ids, ended=True).text == "ab"
        inside = with_eos.stream(params).push([end, *ids], ended=True).text
        assert inside == ("ab" if skip else "<end>ab")
    ignoring = SamplingParams(max_tokens=None, ignore_eos=True, skip_special_tokens=False)
    assert with_eos.stream(ignoring).push(ids, ended=True).text == "ab<end>"


def test_one_bos_however_the_prompt_begins(tiny_random):
    text = TextCodec.load(tiny_random("llama"))
    ids = text.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(256) == 2  # one per turn of the template, none added
    assert ids[0] == 256


def test_chat_templates_that_are_missing_or_refuse_are_typed_errors(tiny_random):
    bare = codec(byte_level_tokenizer())
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        bare.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.code == "no_chat_template"
    strict = codec(
        byte_level_tokenizer(), chat_template="{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        strict.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.code == "bad_messages"


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer"):
        TextCodec.load(tmp_path)


def test_a_file_that_is_there_and_cannot_be_read_is_named(make_byte_model, monkeypatch):
    path = make_byte_model(template="{{ x }}")
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=f"{path}: a file of it is no UTF-8"):
        TextCodec.load(path)

    def denied(file: Path, **_: object) -> object:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "stat", denied)  # root may read everything
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json cannot be read: .* is user"):
        TextCodec.load(path)


@pytest.mark.smollm2
def test_smollm2_text_round_trips(smollm2):
    text = TextCodec.load(smollm2)
    for sample in TEXTS:
        ids = text.encode(sample)
        assert "".join(deltas(text, ids)) == sample


def test_other_threads_go_on_while_a_long_text_is_encoded():
    """In one of some tries: a busy machine may give another thread no turn in all of one."""
    text_codec, text, encoding = codec(byte_level_tokenizer()), "some word " * 20_000, []

    def encode():
        encoding.append(True)
        text_codec.encode(text)
        encoding.clear()

    def turns_of_another() -> int:
        thread, turns = threading.Thread(target=encode), 0
        thread.start()
        while thread.is_alive():
            turns += bool(encoding)
            time.sleep(0)
        thread.join()
        return turns

    assert any(turns_of_another() > 10 for _ in range(20))
