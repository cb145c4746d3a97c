"""What the engine is asked for, and what it answers. Tokens only; text has its own room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenfleet.engine.sampling_params import SamplingParams

ENGINE_ERROR = "engine_error"
"""Code of an output that broke in the engine, through no fault of its request."""
NO_TOKEN_ALLOWED = "no_token_allowed"
"""Of one whose own parameters left it no token to choose."""

Logprobs = dict[int, float]
"""Token id -> natural logarithm of its probability."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and how to continue it."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    resume: tuple[tuple[int, ...], ...] = ()
    """Output tokens already produced elsewhere, per choice; missing choices have none."""
    ended: frozenset[int] = frozenset()
    """Choices that had already ended and are not run again."""
    priority: int = 0
    """Smaller runs first and is preempted last."""
    cache_salt: str = ""
    """Prompts share cached blocks only under the same salt."""


class CoreEvent(NamedTuple):
    """What one step added to one choice; made for every token, so it is a tuple."""

    id: str
    choice: int
    token_ids: list[int]
    """New tokens only; an EOS or stop token is the last of them."""
    finish_reason: str | None = None
    """stop, length, cancelled or error on the last event of the choice, else None."""
    logprobs: list[Logprobs] | None = None
    """One per new token, when asked for."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """On the choice's first event, when asked for; the first entry is None."""
    error: str | None = None
    """What went wrong, in words,"""
    error_code: str | None = None
    """and as a stable word: an InvalidRequest's code, ENGINE_ERROR or NO_TOKEN_ALLOWED."""
    weights_version: int = 0
    """Updates of the weights before the step that made it."""
