"""The engine in one process, text included: for offline use, tests, rollouts and benchmarks.

It adds text to the core and nothing else: what a request's tokens are is decided there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.core import EngineCore
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.request import CoreEvent, EngineRequest, Logprobs
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.stats import StepStats
from tokenfleet.engine.text import TextCodec, TextStream

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class OutputEvent:
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

    def extend(self, event: OutputEvent) -> None:
        """Add what an event brought."""
        self.text += event.text
        self.token_ids += event.token_ids
        self.finish_reason = event.finish_reason
        self.stop, self.error = event.stop, event.error
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
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.choices[0].logprobs

    @property
    def prompt_logprobs(self) -> list[Logprobs | None] | None:
        return self.choices[0].prompt_logprobs

    @property
    def error(self) -> str | None:
        return self.choices[0].error


class Engine:
    """A model, ready to generate.

    Raises:
        ConfigError, UnsupportedModel, CheckpointError: from the constructor.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.text = TextCodec.load(config.model)
        self.core = EngineCore(
            config, known_vocab=self.text.vocab_size, compiler=self.text.compiler()
        )
        self._streams: dict[tuple[str, int], TextStream] = {}
        self._params: dict[str, SamplingParams] = {}
        self._names = count()

    # -- whole prompts ---------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """One output per prompt, in order. A bad prompt gets finish_reason "error".

        Args:
            prompts: texts, or lists of token ids.
            params: for all, or one each.

        Raises:
            ValueError: params is a list of another length than prompts.
        """
        each = _for_each(params, len(prompts))
        return self._run([self._as_request(p, own) for p, own in zip(prompts, each, strict=True)])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
    ) -> Output:
        """Answer a conversation in the model's chat template.

        Raises:
            InvalidRequest: `no_chat_template` or `bad_messages`.
        """
        ids = self.text.encode_chat(messages)
        return self.generate([ids], params)[0]

    # -- step by step ----------------------------------------------------------------------

    def add(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **more: Any
    ) -> None:
        """Queue a request. `more` is passed to EngineRequest (priority, cache_salt, resume, ended).

        Raises:
            InvalidRequest: with a code and what to do; nothing was queued.
        """
        ids = self.text.encode(prompt) if isinstance(prompt, str) else prompt
        request = EngineRequest(request_id, ids, params or SamplingParams(), **more)
        self.core.add(request)
        self._open(request)

    def fork(
        self, request_id: str, new_id: str, params: SamplingParams | None = None, choice: int = 0
    ) -> None:
        """Branch a running request; see EngineCore.fork. The text starts behind the fork."""
        self.core.fork(request_id, new_id, params, choice)
        self._open(EngineRequest(new_id, (), params or self._params[request_id]))

    def abort(self, request_id: str) -> None:
        """End a request with one "cancelled" event in the next step; unknown ids do nothing."""
        self.core.abort(request_id)

    def step(self) -> list[OutputEvent]:
        """Compute one step; events of the choices that got something, [] when idle."""
        return list(self._with_text(self.core.step()))

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        return self.core.has_work

    @property
    def stats(self) -> StepStats:
        """Figures of the last step."""
        return self.core.stats

    def audit(self) -> None:
        """Check every invariant; see EngineCore.audit."""
        self.core.audit()

    # -- inside ----------------------------------------------------------------------------

    def _as_request(self, prompt: Prompt, params: SamplingParams) -> EngineRequest | InvalidRequest:
        name = f"generate-{next(self._names)}"
        try:
            ids = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
            return EngineRequest(name, ids, params)
        except (TypeError, ValueError) as error:
            return InvalidRequest("bad_prompt", f"a prompt is text or token ids: {error}")

    def _run(self, requests: list[EngineRequest | InvalidRequest]) -> list[Output]:
        outputs: list[Output] = []
        by_id: dict[str, Output] = {}
        for request in requests:
            output, accepted = self._accept(request)
            outputs.append(output)
            if accepted is not None:
                by_id[accepted] = output
        while any(choice.finish_reason is None for o in by_id.values() for choice in o.choices):
            for event in self.step():
                if event.id in by_id:
                    by_id[event.id].choices[event.choice].extend(event)
        for output in outputs:
            for choice in output.choices[1:]:
                choice.prompt_logprobs = output.prompt_logprobs
        return outputs

    def _accept(self, request: EngineRequest | InvalidRequest) -> tuple[Output, str | None]:
        """An output to fill and its id; one that is in error, and None, when it is refused."""
        try:
            if isinstance(request, InvalidRequest):
                raise request
            self.core.add(request)
        except InvalidRequest as refusal:
            return Output([], [Choice(finish_reason="error", error=str(refusal))]), None
        self._open(request)
        choices = [Choice() for _ in range(request.params.n)]
        return Output(list(request.prompt_token_ids), choices), request.id

    def _open(self, request: EngineRequest) -> None:
        self._params[request.id] = request.params
        for choice in range(request.params.n):
            if choice not in request.ended:
                stream = self.text.stream(request.params)
                if choice < len(request.resume):
                    stream.push(request.resume[choice])
                self._streams[request.id, choice] = stream

    def _with_text(self, events: list[CoreEvent]) -> Iterator[OutputEvent]:
        for event in events:
            stream = self._streams.get((event.id, event.choice))
            if stream is not None:  # None: its stop string was found, this is the core's echo
                yield self._one_with_text(event, stream)

    def _one_with_text(self, event: CoreEvent, stream: TextStream) -> OutputEvent:
        delta = stream.push(event.token_ids, ended=event.finish_reason is not None)
        reason = "stop" if delta.stop is not None else event.finish_reason
        if delta.stop is not None and event.finish_reason is None:
            self.core.abort(event.id, event.choice)
        if reason is not None:
            self._close(event.id, event.choice)
        kept = delta.num_tokens
        return OutputEvent(
            id=event.id,
            choice=event.choice,
            token_ids=event.token_ids[:kept],
            text=delta.text,
            finish_reason=reason,
            logprobs=event.logprobs[:kept] if event.logprobs is not None else None,
            prompt_logprobs=event.prompt_logprobs,
            stop=delta.stop,
            error=event.error,
        )

    def _close(self, request_id: str, choice: int) -> None:
        del self._streams[request_id, choice]
        params = self._params[request_id]
        if not any((request_id, other) in self._streams for other in range(params.n)):
            del self._params[request_id]


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, length: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * length
    if len(params) != length:
        raise ValueError(
            f"{len(params)} params for {length} prompts; give one each, or one for all"
        )
    return list(params)
