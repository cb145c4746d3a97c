"""The engine in one process, text included: for offline use, tests, rollouts and benchmarks.

It adds text to the core and nothing else: what a request's tokens are is decided there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.core import EngineCore
from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.execution.weights import NewWeights
from tokenfleet.engine.outputs import Choice, Output, OutputEvent
from tokenfleet.engine.request import ENGINE_ERROR, CoreEvent, EngineRequest
from tokenfleet.engine.request_checks import kept
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.engine.stats import StepStats
from tokenfleet.engine.text import TextCodec, TextDelta, TextStream

Prompt = str | Sequence[int]


class Engine:
    """A model, ready to generate.

    Raises:
        ConfigError, UnsupportedModel, CheckpointError: from the constructor.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.text = TextCodec.load(config.model)
        self.core = EngineCore(
            config, known_tokens=self.text.known_tokens, compiler=self.text.compiler()
        )
        self._streams: dict[tuple[str, int], TextStream] = {}
        self._params: dict[str, SamplingParams] = {}
        self._names = count()
        self._ready: list[OutputEvent] = []
        """Events that came about outside of `step`, or while `generate` ran for others."""

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
            ValueError: prompts is one text, or params is a list of another length than prompts.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a list of prompts; for one text give [text]")
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
        self._add(self._request(request_id, prompt, params or SamplingParams(), **more))

    def fork(
        self, request_id: str, new_id: str, params: SamplingParams | None = None, choice: int = 0
    ) -> None:
        """Branch a running request; see EngineCore.fork. The text starts behind the fork."""
        params = params and self.text.in_tokens(params)
        self.core.fork(request_id, new_id, params, choice)
        trunk = self._streams[request_id, choice]
        own = params or self._params[request_id]
        self._params[new_id] = own
        for branch in range(own.n):
            self._streams[new_id, branch] = self.text.fork(trunk, params)

    def abort(self, request_id: str) -> None:
        """End a request with one "cancelled" event in the next step; unknown ids do nothing."""
        self.core.abort(request_id)

    def step(self) -> list[OutputEvent]:
        """Compute one step; events of the choices that got something, [] when idle."""
        events = [*self._ready, *self._with_text(self.core.step())]
        self._ready = []
        return events

    def update_weights(self, weights: NewWeights) -> int:
        """Replace all weights between two steps; see EngineCore.update_weights."""
        return self.core.update_weights(weights)

    def sleep(self) -> None:
        """Free KV blocks and, on CUDA, the card's copy of the weights; see EngineCore.sleep."""
        self.core.sleep()

    def wake(self) -> None:
        """Come back from `sleep`; see EngineCore.wake."""
        self.core.wake()

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        return bool(self._ready) or self.core.has_work

    @property
    def stats(self) -> StepStats:
        """Figures of the last step."""
        return self.core.stats

    def audit(self) -> None:
        """Check every invariant; see EngineCore.audit."""
        self.core.audit()

    # -- inside ----------------------------------------------------------------------------

    def _request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, **more: Any
    ) -> EngineRequest:
        ids = self.text.encode(prompt) if isinstance(prompt, str) else prompt
        request = kept(EngineRequest(request_id, ids, params, **more))
        return replace(request, params=self.text.in_tokens(params))

    def _as_request(self, prompt: Prompt, params: SamplingParams) -> EngineRequest | InvalidRequest:
        try:
            return self._request(f"generate-{next(self._names)}", prompt, params)
        except InvalidRequest as refusal:
            return refusal

    def _run(self, requests: list[EngineRequest | InvalidRequest]) -> list[Output]:
        outputs: list[Output] = []
        by_id: dict[str, Output] = {}
        for request in requests:
            output, accepted = self._accept(request)
            outputs.append(output)
            if accepted is not None:
                by_id[accepted] = output
        try:
            self._fill(by_id)
        finally:
            for name in by_id:
                self.abort(name)
        for output in outputs:
            for choice in output.choices[1:]:
                choice.prompt_logprobs = output.prompt_logprobs
        return outputs

    def _fill(self, outputs: dict[str, Output]) -> None:
        """Step until these outputs have ended; events of others wait for `step`."""
        others, self._ready = self._ready, []
        while any(choice.finish_reason is None for o in outputs.values() for choice in o.choices):
            for event in self.step():
                if event.id in outputs:
                    outputs[event.id].choices[event.choice].extend(event)
                else:
                    others.append(event)
        self._ready = others

    def _accept(self, request: EngineRequest | InvalidRequest) -> tuple[Output, str | None]:
        """An output to fill and its id; one that is in error, and None, when it is refused."""
        try:
            if isinstance(request, InvalidRequest):
                raise request
            self._add(request)
        except InvalidRequest as refusal:
            said = Choice(finish_reason="error", error=str(refusal), error_code=refusal.code)
            return Output([], [said]), None
        choices = [Choice() for _ in range(request.params.n)]
        return Output([int(token) for token in request.prompt_token_ids], choices), request.id

    def _add(self, request: EngineRequest) -> None:
        if any(event.id == request.id for event in self._ready):
            raise InvalidRequest(
                "duplicate_id", f"events of {request.id!r} have not been taken yet"
            )
        self.core.add(request)
        open_choices = [c for c in range(request.params.n) if c not in request.ended]
        if open_choices:
            self._params[request.id] = request.params
        for choice in open_choices:
            self._streams[request.id, choice] = self.text.stream(request.params)
        for choice in open_choices:
            if choice < len(request.resume):
                self._replay(request, choice)

    def _replay(self, request: EngineRequest, choice: int) -> None:
        """Bring a resumed output's text to where it was; a stop string in it has ended it."""
        delta = self._streams[request.id, choice].push(request.resume[choice])
        if delta.stop is not None:
            self.core.finish(request.id, choice)
            self._ready.append(OutputEvent(request.id, choice, [], "", "stop", stop=delta.stop))
            self._close(request.id, choice)

    def _with_text(self, events: list[CoreEvent]) -> Iterator[OutputEvent]:
        for event in events:
            stream = self._streams.get((event.id, event.choice))
            if stream is not None:
                yield self._one_with_text(event, stream)

    def _one_with_text(self, event: CoreEvent, stream: TextStream) -> OutputEvent:
        error, code = event.error, event.error_code
        try:
            delta = stream.push(event.token_ids, ended=event.finish_reason is not None)
        except Exception as broken:  # noqa: BLE001 - one output's text must not end the others
            delta, code = TextDelta("", None, 0), ENGINE_ERROR
            error = f"its text cannot be decoded: {broken}"
        reason = event.finish_reason if error is None else "error"
        # of one that was cancelled, half a character may be left that becomes a stop string
        stop = delta.stop if reason not in ("cancelled", "error") else None
        if stop is not None:
            reason = "stop"
        if reason is not None and event.finish_reason is None:
            self.core.finish(event.id, event.choice)
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
            stop=stop,
            error=error,
            error_code=code,
            weights_version=event.weights_version,
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
    for one in params:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {one!r}")
    if len(params) != length:
        raise ValueError(
            f"{len(params)} params for {length} prompts; give one each, or one for all"
        )
    return list(params)
