"""How one request is to be sampled.

A SamplingParams that exists is valid: whatever is out of range is refused when it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenfleet.engine.errors import InvalidRequest

MAX_N = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1024
MAX_TOKENS = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Temperatures under this are argmax: dividing by them overflows before it sharpens further."""

STRUCTURED_KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, in the order in which they act.

    Raises:
        InvalidRequest: code `invalid_parameter`, naming field, value and range.
    """

    max_tokens: int | None = 16
    """Output tokens at most; None = as many as max_model_len leaves room for; 0 = none."""
    min_tokens: int = 0
    """EOS, stop ids and stop strings cannot end the output before this many tokens."""
    temperature: float = 1.0
    """0 (or anything under 1e-5) picks the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 0 keeps the best one."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 and -1 mean all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    seed: int | None = None
    """Same seed, same request: same tokens, whatever else runs. None draws one at random."""
    n: int = 1
    """Samples of the one prompt; each is a choice, numbered from 0."""
    stop: Sequence[str] = ()
    """Strings that end the output where they first appear in its visible text."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, like EOS."""
    ignore_eos: bool = False
    """Go on past the model's own EOS tokens; stop_token_ids still count."""
    include_stop: bool = False
    """Leave the stop string that matched at the end of the text."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides positive (multiplies negative) logits of tokens in prompt or output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None = None
    """No other token is ever chosen, EOS included; None allows all."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Each a text or its token ids: the last token of one is not chosen behind its others, be
    these output or the end of the prompt. A text stands for its own tokens, and for those that it
    has behind a space."""
    logprobs: int | None = None
    """Report this many best tokens per position beside the chosen one; 0 = only the chosen."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens."""
    logprobs_mode: str = "raw"
    """`raw`: the model's distribution; `processed`: after penalties, temperature and filters."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text (never out of token_ids)."""
    structured_outputs: Mapping[str, Any] | None = None
    """Exactly one of {"json": schema}, {"regex": ...}, {"choice": [...]}, {"grammar": ebnf}."""
    truncate_prompt_tokens: int | None = None
    """Keep no more than this many tokens of the prompt, its last ones; None keeps all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _as_allowed(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _as_words(self.bad_words))
        _check_lengths(self)
        _check_distribution(self)
        _check_stops(self)
        _check_forbidden(self)
        _check_reports(self)
        _check_structured(self.structured_outputs)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether any penalty needs the counts of earlier tokens."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def bad_word_ids(self) -> list[Sequence[int]]:
        """The bad words, which have to be given as token ids by now."""
        return [word for word in self.bad_words if not isinstance(word, str)]

    @property
    def forbids(self) -> bool:
        """Whether some tokens are never, or not everywhere, chosen."""
        return self.allowed_token_ids is not None or bool(self.bad_words)

    def ending_tokens(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that end an output: the caller's, and the model's unless ignored."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own | frozenset(eos_token_ids)


def _as_stops(stop: object) -> tuple[Any, ...]:
    if isinstance(stop, str):
        return (stop,)
    if stop is None or isinstance(stop, Sequence):
        return tuple(stop or ())
    raise _refuse("stop", stop, "a string or a list of strings")


def _as_ids(name: str, ids: object) -> tuple[Any, ...]:
    if ids is None or (isinstance(ids, Sequence) and not isinstance(ids, str)):
        return tuple(ids or ())
    raise _refuse(name, ids, "a list of token ids")


def _as_allowed(ids: object) -> tuple[Any, ...] | None:
    if ids is None or (allowed := _as_ids("allowed_token_ids", ids)):
        return None if ids is None else allowed
    raise _refuse("allowed_token_ids", ids, "None, or a list of at least one token id")


def _as_words(words: object) -> tuple[Any, ...]:
    if words is None or (isinstance(words, Sequence) and not isinstance(words, str)):
        each = words or ()
        return tuple(w if isinstance(w, str) else _as_ids("each of bad_words", w) for w in each)
    raise _refuse("bad_words", words, "a list of texts or of lists of token ids")


def _as_bias(bias: object) -> dict[Any, Any]:
    if bias is None or isinstance(bias, Mapping):
        return dict(bias or {})
    raise _refuse("logit_bias", bias, "a mapping of token ids to numbers")


def _refuse(name: str, value: object, want: str) -> InvalidRequest:
    return InvalidRequest("invalid_parameter", f"{name} must be {want}, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int | None, want: str) -> None:
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):  # type: ignore[operator]
        raise _refuse(name, value, want)


def _check_float(name: str, value: object, low: float, high: float, want: str) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator] # NaN fails both
        raise _refuse(name, value, want)


def _check_lengths(p: SamplingParams) -> None:
    if p.max_tokens is not None:
        _check_int("max_tokens", p.max_tokens, 0, MAX_TOKENS, f"None, or 0 to {MAX_TOKENS}")
    _check_int("min_tokens", p.min_tokens, 0, MAX_TOKENS, f"from 0 to {MAX_TOKENS}")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise _refuse("min_tokens", p.min_tokens, f"at most max_tokens ({p.max_tokens})")
    _check_int("n", p.n, 1, MAX_N, f"an integer from 1 to {MAX_N}")
    if p.seed is not None:
        _check_int("seed", p.seed, -(2**63), 2**64 - 1, "an integer of at most 64 bits, or None")
    if p.truncate_prompt_tokens is not None:
        _check_int("truncate_prompt_tokens", p.truncate_prompt_tokens, 1, None, "None or from 1")


def _check_distribution(p: SamplingParams) -> None:
    _check_float("temperature", p.temperature, 0.0, 1e6, "a finite number of at least 0")
    _check_float("top_p", p.top_p, 0.0, 1.0, "from 0 to 1")
    _check_int("top_k", p.top_k, -1, None, "-1 or 0 (off), or at least 1")
    _check_float("min_p", p.min_p, 0.0, 1.0, "from 0 to 1")
    _check_float("presence_penalty", p.presence_penalty, -2.0, 2.0, "from -2 to 2")
    _check_float("frequency_penalty", p.frequency_penalty, -2.0, 2.0, "from -2 to 2")
    _check_float("repetition_penalty", p.repetition_penalty, 1e-6, 1e6, "above 0 and finite")
    for token, bias in p.logit_bias.items():
        _check_int("a key of logit_bias", token, 0, None, "a token id")
        _check_float(f"logit_bias[{token}]", bias, -1e9, 1e9, "a finite number")


def _check_stops(p: SamplingParams) -> None:
    for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
        if not isinstance(getattr(p, name), bool):
            raise _refuse(name, getattr(p, name), "true or false")
    if len(p.stop) > MAX_STOPS:
        raise _refuse("stop", f"{len(p.stop)} strings", f"at most {MAX_STOPS} strings")
    for text in p.stop:
        if not isinstance(text, str) or not text:
            raise _refuse("each of stop", text, "a string that is not empty")
    for token in p.stop_token_ids:
        _check_int("each of stop_token_ids", token, 0, None, "a token id")


def _check_forbidden(p: SamplingParams) -> None:
    for token in p.allowed_token_ids or ():
        _check_int("each of allowed_token_ids", token, 0, None, "a token id")
    if len(p.bad_words) > MAX_BAD_WORDS:
        raise _refuse("bad_words", f"{len(p.bad_words)} words", f"at most {MAX_BAD_WORDS}")
    for word in p.bad_words:
        if not word:
            raise _refuse("each of bad_words", word, "a text or token ids, and not empty")
        for token in () if isinstance(word, str) else word:
            _check_int("a token of bad_words", token, 0, None, "a token id")


def _check_reports(p: SamplingParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None:
            _check_int(name, value, 0, MAX_LOGPROBS, f"None, or from 0 to {MAX_LOGPROBS}")
    mode: object = p.logprobs_mode
    if not isinstance(mode, str) or mode not in ("raw", "processed"):
        raise _refuse("logprobs_mode", p.logprobs_mode, '"raw" or "processed"')


def _check_structured(wanted: Mapping[str, Any] | None) -> None:
    if wanted is None:
        return
    if (
        not isinstance(wanted, Mapping)
        or len(wanted) != 1
        or next(iter(wanted)) not in STRUCTURED_KINDS
    ):
        raise _refuse("structured_outputs", wanted, f"a mapping with one of {STRUCTURED_KINDS}")
