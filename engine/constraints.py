"""Structured output: which tokens a grammar allows next.

llguidance does the parsing. It was chosen over xgrammar: it compiles lazily (milliseconds where
xgrammar took tens of them for the same schemas), needs neither torch nor triton nor a compiler of
its own, refuses what it does not support instead of ignoring it (look-ahead in a pattern, an
unknown type), and one library serves JSON schema, regex and EBNF. It is imported when the first
constrained request comes.

A constraint is advanced over every output token of its sequence, so one that is resumed elsewhere
is where it was once it has accepted the logged tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenfleet.engine.errors import InvalidRequest

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to space JSON: free white space lets a small model fill its output with blanks. A schema
that wants another sets its own "x-guidance"."""
MAX_GRAMMAR_BYTES = 128 << 10
COMPILE_LIMIT_S = 10.0
"""A grammar that takes longer to compile ends its request."""


class Constraint:
    """Where one output is in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self.vocab_size = vocab_size

    @property
    def matcher(self) -> Any:
        """llguidance's LLMatcher."""
        return self._matcher

    @property
    def complete(self) -> bool:
        """Nothing may follow."""
        return bool(self._matcher.is_stopped())

    def accept(self, token: int) -> str | None:
        """Advance over an output token; what is wrong when the grammar does not allow it."""
        if self._matcher.consume_token(token):
            return None
        return _said(self._matcher) or f"the grammar does not allow token {token} here"

    def copy(self) -> Constraint:
        """An independent constraint at the same place."""
        return Constraint(self._matcher.deep_copy(), self.vocab_size)


class ConstraintCompiler:
    """Compiles grammars for one tokenizer. Safe to call from a thread.

    Args:
        tokenizer_json: gives the content of tokenizer.json when it is first needed.
        vocab_size: tokens that a mask covers.
        eos_token_ids: tokens that end an output; those beyond the vocabulary never come.
    """

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self.vocab_size = vocab_size
        self._eos_token_ids = sorted(id for id in eos_token_ids if 0 <= id < vocab_size)

    def compile(self, wanted: Mapping[str, Any]) -> Constraint:
        """A constraint at its start, from {"json" | "regex" | "choice" | "grammar": ...}.

        Raises:
            InvalidRequest: `unsupported_grammar`, with what llguidance says of it.
        """
        from llguidance import LLMatcher, LLParserLimits

        grammar = _grammar(wanted)
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                "unsupported_grammar",
                f"the grammar has {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES} are taken",
            )
        limits = LLParserLimits(verbose_errors=False)  # else the parser's state is part of them
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar too wide for the parser shows here, not in a step
        if matcher.is_error():
            raise InvalidRequest(
                "unsupported_grammar", f"structured_outputs cannot be compiled: {_said(matcher)}"
            )
        return Constraint(matcher, self.vocab_size)

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(
            self._tokenizer_json(), n_vocab=self.vocab_size, eos_token=self._eos_token_ids or None
        )


def allowed_words(constraints: Sequence[Constraint]) -> NDArray[np.int32]:
    """Which tokens each of R constraints allows next, int32 [R, W]: bit v % 32 of word v // 32 is
    token v's, and those behind the vocabulary are 0."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    width = constraints[0].vocab_size
    words: NDArray[np.int32] = allocate_token_bitmask(len(constraints), width)
    matchers = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
    fill_next_token_bitmask_par(_executor(), matchers, words)
    if width % 32:
        words[:, width // 32] &= (1 << width % 32) - 1
    return words


@cache
def _executor() -> Any:
    """llguidance's thread pool, one per process."""
    from llguidance import LLExecutor

    return LLExecutor()


def _grammar(wanted: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    kind, value = next(iter(wanted.items()))
    try:
        if kind == "json":
            schema = value if isinstance(value, str) else json.dumps(value)
            return str(LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE))
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(value))
        if kind == "choice":
            return str(LLMatcher.grammar_from_regex(_choice(value)))
        return str(LLMatcher.grammar_from_lark(value))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(
            "unsupported_grammar", f"structured_outputs[{kind!r}] is not understood: {error}"
        ) from error


def _said(matcher: Any) -> str:
    """What a matcher in error has to say."""
    reason = str(matcher.get_error()).removesuffix("\n<non-verbose/>")
    return "it allows no text at all" if reason == "NoExtensionBias" else reason


def _choice(options: Any) -> str:
    if not isinstance(options, (list, tuple)) or not options:
        raise ValueError("choice takes a list of at least one string")
    if not all(isinstance(option, str) and option for option in options):
        raise ValueError("every choice is a string that is not empty")
    return "|".join(_escaped(option) for option in options)


def _escaped(text: str) -> str:
    """A regular expression that matches this text alone, in the syntax of Rust's regex."""
    return "".join(letter if letter.isalnum() else f"\\u{{{ord(letter):X}}}" for letter in text)
