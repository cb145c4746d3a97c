"""Between text and tokens: encoding, chat templates, and the text of a running output.

Light on purpose: transformers, which renders chat templates, is imported when first needed, and
torch never.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tokenfleet.engine.constraints import ConstraintCompiler
from tokenfleet.engine.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    PieceTable,
    WindowDetokenizer,
)
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.stops import StopMatcher
from tokenfleet.engine.tokenizer_files import TokenizerFiles

# one text at a time has nothing to share, and its threads would not live through a fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TextDelta(NamedTuple):
    """What some tokens added to an output's text; made for every token."""

    text: str
    stop: str | None
    """The stop string that ended the output, if one did."""
    num_tokens: int
    """How many of the tokens belong to the output; a stop string drops those behind it."""


class TextCodec:
    """One model's tokenizer and chat template. Safe to share between threads.

    Use `TextCodec.load(path)`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self._named = dict(named_tokens or {})

    @classmethod
    def load(cls, path: str | Path) -> TextCodec:
        """Read the tokenizer beside a checkpoint.

        Raises:
            CheckpointError: there is none, or a file of it cannot be read.
        """
        files = TokenizerFiles.read(path)
        return cls(
            files.tokenizer,
            eos_token_ids=files.eos_token_ids,
            chat_template=files.chat_template,
            named_tokens=files.named_tokens,
        )

    @property
    def vocab_size(self) -> int:
        """One above the highest id that the tokenizer has."""
        return max(self.known_tokens, default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the tokenizer's own BOS at most once.

        Raises:
            InvalidRequest: `bad_prompt`: this is no text, or the tokenizer has no tokens for it.
        """
        ids = self._ids(text, add_special_tokens=True)
        bos = self._bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            return ids[1:]
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template.

        Raises:
            InvalidRequest: `no_chat_template`, `bad_messages` when the template refuses them, or
                `bad_prompt` as in encode.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self._ids(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model reads it; see encode_chat for errors."""
        if self.chat_template is None:
            raise InvalidRequest(
                "no_chat_template",
                "this model has no chat template; send prompt or prompt_token_ids instead",
            )
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        try:
            rendered, _spans = render(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **self._named,
            )
        except Exception as error:
            raise InvalidRequest(
                "bad_messages", f"the chat template refused these messages: {error}"
            ) from error
        text: str = rendered[0]
        return text

    def in_tokens(self, params: SamplingParams) -> SamplingParams:
        """The parameters with bad words as token ids, as the engine takes them.

        Raises:
            InvalidRequest: `invalid_parameter`: the tokenizer has no tokens for a word.
        """
        if all(not isinstance(word, str) for word in params.bad_words):
            return params
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            words.update(dict.fromkeys(self._spellings(word)))
        return replace(params, bad_words=tuple(words))

    def _spellings(self, word: str | Sequence[int]) -> list[tuple[int, ...]]:
        """A word's tokens, and those that it has behind a space."""
        if not isinstance(word, str):
            return [tuple(word)]
        texts = [word] if word[0].isspace() else [word, f" {word}"]
        found = [tuple(self._ids(text, add_special_tokens=False)) for text in texts]
        if not all(found):
            raise InvalidRequest(
                "invalid_parameter", f"the tokenizer has no tokens for {word!r} of bad_words"
            )
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of complete output."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def compiler(self) -> ConstraintCompiler:
        """Compiles structured outputs for this tokenizer."""
        return ConstraintCompiler(self.tokenizer.to_str, self.vocab_size, self.eos_token_ids)

    def stream(self, params: SamplingParams) -> TextStream:
        """The text of one output that is about to come."""
        detokenizer: Detokenizer
        pieces = self._visible if params.skip_special_tokens else self._all
        if pieces.style == "window":
            skip = params.skip_special_tokens
            detokenizer = WindowDetokenizer(self.tokenizer, skip_special_tokens=skip)
        else:
            detokenizer = ByteDetokenizer(pieces)
        return TextStream(detokenizer, params, params.ending_tokens(self.eos_token_ids))

    def fork(self, stream: TextStream, params: SamplingParams | None) -> TextStream:
        """The text of an output that branches off from another's; see TextStream.fork."""
        ending = params.ending_tokens(self.eos_token_ids) if params else frozenset[int]()
        return stream.fork(params, ending)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # not `encode`: it holds the interpreter to its end, seconds for a text of megabytes
            (encoded,) = self.tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except Exception as error:
            raise InvalidRequest(
                "bad_prompt", f"the tokenizer cannot encode this prompt: {error}"
            ) from error
        ids: list[int] = encoded.ids
        return ids

    @cached_property
    def known_tokens(self) -> frozenset[int]:
        """Every id that the tokenizer has."""
        return frozenset(self.tokenizer.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _visible(self) -> PieceTable:
        added = self.tokenizer.get_added_tokens_decoder()
        special = frozenset(i for i, token in added.items() if token.special)
        return PieceTable(self.tokenizer, special)

    @cached_property
    def _all(self) -> PieceTable:
        return PieceTable(self.tokenizer, frozenset())

    @cached_property
    def _bos_id(self) -> int | None:
        name = self._named.get("bos_token")
        found: int | None = self.tokenizer.token_to_id(name) if name else None
        return found


class TextStream:
    """The visible text of one output, as its tokens come.

    The deltas joined are the output's text: no half characters, nothing at or behind a stop string,
    no end-of-sequence or stop token.
    """

    def __init__(
        self, detokenizer: Detokenizer, params: SamplingParams, ending: frozenset[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(params.stop, include=params.include_stop)
        self._looks = bool(self._stops)
        self._min_tokens = params.min_tokens
        self._ending = ending
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], *, ended: bool = False) -> TextDelta:
        """Take new tokens; `ended` says that no more will come (the last may be an EOS token)."""
        visible = token_ids[:-1] if ended and self._ends(token_ids) else token_ids
        if not self._looks:  # nothing is looked for, nothing held back
            self._num_tokens += len(visible)
            if len(visible) == 1:
                text = self._detokenizer.push(visible[0])
            else:
                text = "".join([self._detokenizer.push(token_id) for token_id in visible])
            if ended:
                text += self._detokenizer.flush()
            return TextDelta(text, None, len(token_ids))
        texts = []
        for count, token_id in enumerate(visible, 1):
            self._num_tokens += 1
            piece = self._detokenizer.push(token_id)
            may_stop = self._num_tokens >= self._min_tokens
            released = self._stops.push(piece, may_stop=may_stop)
            texts.append(released.text)
            if released.stop is not None:
                return TextDelta("".join(texts), released.stop, count)
        if not ended:
            return TextDelta("".join(texts), None, len(token_ids))
        last = self._stops.push(self._detokenizer.flush())
        texts.append(last.text if last.stop is not None else last.text + self._stops.flush())
        return TextDelta("".join(texts), last.stop, len(token_ids))

    def fork(self, params: SamplingParams | None, ending: frozenset[int]) -> TextStream:
        """An independent text that goes on from here, with its own stops if it has parameters."""
        twin = copy(self)
        twin._detokenizer = self._detokenizer.copy()
        twin._stops = self._stops.copy()
        if params is not None:
            twin._stops = StopMatcher(params.stop, include=params.include_stop)
            twin._looks = bool(twin._stops)
            twin._min_tokens, twin._ending = params.min_tokens, ending
        twin._num_tokens = 0
        return twin

    def _ends(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids) and token_ids[-1] in self._ending
