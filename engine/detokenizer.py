"""From token ids to text, piece by piece.

The pieces joined are the decoded whole, and no piece ends inside a character. Tokens become bytes,
and bytes become text through an incremental UTF-8 decoder, so a token costs the same however long
the output is, and bytes that never become a character turn into U+FFFD at once instead of being
waited for. Tokenizers that are neither byte-level nor byte-fallback decode a sliding window
instead.
"""

from __future__ import annotations

import codecs
import json
import re
from contextlib import suppress
from functools import cache
from typing import Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW_WAIT = 8
"""Tokens after which a window that still ends in U+FFFD is let out as it is."""


class Detokenizer(Protocol):
    """Decodes one output."""

    def push(self, token_id: int) -> str:
        """Text that became complete with this token; often empty, never half a character."""
        ...

    def flush(self) -> str:
        """What is left, with U+FFFD for bytes that never became a character."""
        ...

    def copy(self) -> Detokenizer:
        """An independent one in the same state."""
        ...


class PieceTable:
    """The bytes of each token, worked out when first seen.

    Args:
        tokenizer: with a ByteLevel decoder, or a Sequence of Replace and ByteFallback.
        skip: ids without text (special tokens).
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        kind = json.loads(tokenizer.to_str())["decoder"]
        self.style = _style_of(kind)
        self.strips_first_space = self.style == "fallback" and _strips_start(kind)
        self._tokenizer = tokenizer
        self._skip = skip
        self._known: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}
        """Of tokens seen that are whole characters by themselves."""

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8, possibly an incomplete character; empty for ids without text."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._work_out(token_id)
            with suppress(UnicodeDecodeError):
                self.texts[token_id] = piece.decode()
        return piece

    def _work_out(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._skip:
            return b""
        if self.style == "byte_level":
            return _byte_level(token)
        as_byte = _BYTE_TOKEN.fullmatch(token)
        if as_byte:
            return bytes([int(as_byte[1], 16)])
        return token.replace("▁", " ").encode()


class ByteDetokenizer:
    """For byte-level and byte-fallback tokenizers."""

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = pieces.strips_first_space

    def push(self, token_id: int) -> str:
        """The token's bytes, as far as they are whole characters."""
        text = self._pieces.texts.get(token_id)
        if text is not None and not self._at_start and not self._decoder.buffer:
            return text  # as nearly always
        return self._strip(self._decoder.decode(self._pieces.bytes_of(token_id)))

    def flush(self) -> str:
        """What is left: half a character is one U+FFFD."""
        return self._strip(self._decoder.decode(b"", True))

    def copy(self) -> ByteDetokenizer:
        """Another that goes on from here."""
        twin = ByteDetokenizer(self._pieces)
        twin._decoder.setstate(self._decoder.getstate())
        twin._at_start = self._at_start
        return twin

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window twice and lets out the difference."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0

    def push(self, token_id: int) -> str:
        """What the token added, or nothing while the text may end in half a character."""
        self._ids.append(token_id)
        if len(self._ids) - self._read < _WINDOW_WAIT and self._decode(0).endswith("�"):
            return ""
        return self.flush()

    def flush(self) -> str:
        """All that has not been let out."""
        before = self._tokenizer.decode(self._ids[: self._read], skip_special_tokens=self._skip)
        now = self._decode(0)
        if len(now) > len(before) or not now:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
        return now[len(before) :]

    def copy(self) -> WindowDetokenizer:
        """Another that goes on from here."""
        twin = WindowDetokenizer(self._tokenizer, skip_special_tokens=self._skip)
        twin._ids, twin._read = list(self._ids), self._read
        return twin

    def _decode(self, first: int) -> str:
        return self._tokenizer.decode(self._ids[first:], skip_special_tokens=self._skip)


@cache
def _byte_of_letter() -> dict[str, int]:
    """The printable letter that byte-level tokenizers write for each byte, inverted.

    Printable Latin-1 bytes stand for themselves; the others are counted on from U+0100 (Radford et
    al. 2019).
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [b for b in range(256) if b not in set(plain)]
    table = {chr(b): b for b in plain}
    return table | {chr(256 + i): b for i, b in enumerate(shifted)}


def _byte_level(token: str) -> bytes:
    table = _byte_of_letter()
    if all(letter in table for letter in token):
        return bytes(table[letter] for letter in token)
    return token.encode()


def _parts(decoder: dict[str, object] | None) -> list[dict[str, object]]:
    if decoder is None:
        return []
    inner = decoder.get("decoders")
    return list(inner) if isinstance(inner, list) else [decoder]


def _style_of(decoder: dict[str, object] | None) -> str:
    parts = _parts(decoder)
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return "byte_level"
    replaces = [p for p in parts if p["type"] == "Replace"]
    plain = all(p["pattern"] == {"String": "▁"} and p["content"] == " " for p in replaces)
    known = set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
    if known and "ByteFallback" in kinds and len(replaces) == 1 and plain:
        return "fallback"
    return "window"


def _strips_start(decoder: dict[str, object] | None) -> bool:
    return any(p["type"] == "Strip" and p.get("start") for p in _parts(decoder))
