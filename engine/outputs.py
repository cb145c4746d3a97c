"""What a caller of `Engine` gets: events of one step, and whole outputs made of them.

An output is the sum of its events: nothing is in one that was not in the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tokenfleet.engine.request import Logprobs


class OutputEvent(NamedTuple):
    """What one step added to one choice; see CoreEvent, and `text` for the visible part."""

    id: str
    choice: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    stop: str | None = None
    """The stop string that ended it."""
    error: str | None = None
    error_code: str | None = None
    """See CoreEvent."""
    weights_version: int = 0
    """Updates of the weights before the step that made it."""


@dataclass(slots=True)
class Choice:
    """One finished sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    stop: str | None = None
    error: str | None = None
    error_code: str | None = None
    """See CoreEvent."""
    weights_versions: list[int] = field(default_factory=list)
    """Versions of the weights that its tokens were made with, in order."""

    def extend(self, event: OutputEvent) -> None:
        """Add what an event brought."""
        self.text += event.text
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason
        self.stop, self.error, self.error_code = event.stop, event.error, event.error_code
        if event.weights_version not in self.weights_versions:
            self.weights_versions.append(event.weights_version)
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs


@dataclass(frozen=True, slots=True)
class Output:
    """All samples of one prompt; the short names are those of choice 0."""

    prompt_token_ids: list[int]
    choices: list[Choice]

    @property
    def text(self) -> str:
        """Without the token, and by default the stop string, that ended it."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Every token that was sampled, the one that ended it included."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, `cancelled` or `error`."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        """{token id: log probability} for each of token_ids, where asked for."""
        return self.choices[0].logprobs

    @property
    def prompt_logprobs(self) -> list[Logprobs | None] | None:
        """The same for each prompt token, where asked for; None for the first."""
        return self.choices[0].prompt_logprobs

    @property
    def error(self) -> str | None:
        """What went wrong, with finish_reason `error`."""
        return self.choices[0].error

    @property
    def error_code(self) -> str | None:
        """The same as a stable word; see CoreEvent."""
        return self.choices[0].error_code

    @property
    def weights_versions(self) -> list[int]:
        """Versions of the weights that its tokens were made with, in order."""
        return self.choices[0].weights_versions
