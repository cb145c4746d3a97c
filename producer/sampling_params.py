"""What a job may ask of sampling, checked before anything is sent.

The engine has a class of the same name with the same fields, defaults and ranges; this one exists
so that a client needs no torch. On the wire only what differs from the default is written.

Invariant: an instance is valid; whoever holds one need not check it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tokenfleet.producer.checks import check_plain, is_int, is_number, is_text
from tokenfleet.producer.errors import InvalidJob
from tokenfleet.producer.wire import wire_of

_GRAMMARS = frozenset({"json", "regex", "choice", "grammar"})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends."""

    max_tokens: int | None = 16
    """Most output tokens of each choice; None: as many as the model's length allows."""
    min_tokens: int = 0
    """Neither EOS nor a stop ends a choice before this many tokens."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    seed: int | None = None
    """Same seed, same tokens: in any batch and on any worker."""
    n: int = 1
    """Number of independent choices."""
    stop: str | Sequence[str] = ()
    """Texts that end a choice; not part of it unless include_stop. A tuple once it is made."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    """No other token is ever chosen, EOS included; None allows all."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Texts, or lists of token ids: the last token of one is not chosen behind its others."""
    logprobs: int | None = None
    """That many likeliest alternatives with each token; 0: the chosen one only."""
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    """`raw`: of the model; `processed`: after all filters."""
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = None
    """Exactly one of json, regex, choice, grammar."""
    truncate_prompt_tokens: int | None = None
    """Keep no more than this many tokens of the prompt, its last ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        _check_lengths(self)
        _check_shape(self)
        _check_penalties(self)
        _check_extras(self)

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return wire_of(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SamplingParams:
        """Back from `to_wire`. Raises InvalidJob for a field that is not known here."""
        unknown = set(wire) - {spec.name for spec in fields(cls)}
        if unknown:
            raise InvalidJob(
                "sampling", sorted(map(str, unknown)), "must hold only known parameters"
            )
        return cls(**wire)


def _whole(name: str, value: object, low: int, high: int, way_out: str) -> None:
    if not is_int(value) or not low <= value <= high:  # type: ignore[operator]
        raise InvalidJob(name, value, way_out)


def _real(name: str, value: object, low: float, high: float, way_out: str) -> None:
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise InvalidJob(name, value, way_out)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or not all(map(is_text, value)):
        raise InvalidJob(name, value, "must be a text or a list of texts")
    if len(value) > 16 or not all(value):
        raise InvalidJob(name, value, "must hold at most 16 texts, none of them empty")
    return tuple(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidJob(name, value, "must be a list of token ids")
    if not all(is_int(token) and 0 <= token < 2**31 for token in value):
        raise InvalidJob(name, value, "must hold token ids, integers of 0 or more")
    return tuple(value)


def _allowed(value: object) -> tuple[int, ...] | None:
    allowed = None if value is None else _ids("allowed_token_ids", value)
    if allowed == ():
        raise InvalidJob("allowed_token_ids", value, "must hold at least one token id, or be None")
    return allowed


def _words(value: object) -> tuple[str | tuple[int, ...], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidJob("bad_words", value, "must be a list of texts or of lists of token ids")
    if len(value) > 1024 or not all(value):
        raise InvalidJob("bad_words", value, "must hold at most 1024 words, none of them empty")
    return tuple(word if is_text(word) else _ids("bad_words", word) for word in value)


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        way_out = "must lie between 0 and 2**31, or be None for no limit"
        _whole("max_tokens", params.max_tokens, 0, 2**31, way_out)
    limit = 2**31 if params.max_tokens is None else params.max_tokens
    _whole("min_tokens", params.min_tokens, 0, limit, "must lie between 0 and max_tokens")
    _whole("n", params.n, 1, 128, "must lie between 1 and 128")
    if params.seed is not None:
        _whole("seed", params.seed, -(2**63), 2**64 - 1, "must fit in 64 bits, or be None")
    if params.truncate_prompt_tokens is not None:
        way_out = "must be 1 or more, or None for the whole prompt"
        _whole("truncate_prompt_tokens", params.truncate_prompt_tokens, 1, 2**31, way_out)


def _check_shape(params: SamplingParams) -> None:
    _real("temperature", params.temperature, 0.0, math.inf, "must be finite and 0 or more")
    _real("top_p", params.top_p, 0.0, 1.0, "must lie between 0 and 1")
    _real("min_p", params.min_p, 0.0, 1.0, "must lie between 0 and 1")
    _whole("top_k", params.top_k, -1, 2**31, "must be 1 or more, or 0 or -1 for off")


def _check_penalties(params: SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        _real(name, getattr(params, name), -2.0, 2.0, "must lie between -2 and 2")
    _real("repetition_penalty", params.repetition_penalty, 0.0, math.inf, "must be above 0")
    if params.repetition_penalty == 0:
        raise InvalidJob("repetition_penalty", params.repetition_penalty, "must be above 0")
    if not isinstance(params.logit_bias, Mapping):
        raise InvalidJob("logit_bias", params.logit_bias, "must map token ids to numbers")
    for token, bias in params.logit_bias.items():
        _whole("logit_bias", token, 0, 2**31, "must have token ids as keys")
        _real("logit_bias", bias, -math.inf, math.inf, "must have finite numbers as values")


def _check_extras(params: SamplingParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _whole(name, getattr(params, name), 0, 20, "must lie between 0 and 20, or be None")
    mode = params.logprobs_mode
    if not isinstance(mode, str) or mode not in ("raw", "processed"):
        raise InvalidJob("logprobs_mode", params.logprobs_mode, "must be 'raw' or 'processed'")
    for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise InvalidJob(name, getattr(params, name), "must be True or False")
    grammar = params.structured_outputs
    if grammar is not None and (
        not isinstance(grammar, Mapping) or len(grammar) != 1 or not grammar.keys() <= _GRAMMARS
    ):
        raise InvalidJob(
            "structured_outputs", grammar, "must be exactly one of json, regex, choice, grammar"
        )
    check_plain("structured_outputs", grammar)
