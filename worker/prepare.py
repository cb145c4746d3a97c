"""From what a producer asked for to what the engine takes: text to ids, parameters, old tokens.

Whatever is wrong with one job is a BadJob with a code and a sentence; it never leaves here as
anything else, so that no payload can end the worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.producer.protocol import JobRequest
from tokenfleet.worker.choices import TextStream
from tokenfleet.worker.jobs import Job, Stage
from tokenfleet.worker.queue import ClaimedJob

INLINE_CHARS = 2_000
"""A prompt up to this long is tokenized on the event loop: under a millisecond."""
INLINE_TOKENS = 256
"""Logged tokens up to this many are replayed there."""

PRIORITIES = {"interactive": 0, "default": 1, "batch": 2}
"""The engine's order among waiting sequences: smaller first."""

_PARAM_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))


class Codec(Protocol):
    """Text and ids (engine/text.py: TextCodec)."""

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]: ...
    def in_tokens(self, params: SamplingParams) -> SamplingParams: ...
    def stream(self, params: SamplingParams) -> TextStream: ...


class BadJob(Exception):
    """This job can never run, here or elsewhere."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Preparer:
    """Makes claimed jobs ready for the engine, short ones at once and others in a thread."""

    def __init__(self) -> None:
        self.codec: Codec
        """Set once, before the first job."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    async def prepare(self, job: Job) -> None:
        """Move the job to READY, or to ENDED where its log already holds all of it.

        Raises:
            BadJob: code and sentence for its terminal event.
        """
        loop = asyncio.get_running_loop()
        request, streams = await loop.run_in_executor(self._threads, self._parts, job.claimed)
        replayed = await loop.run_in_executor(self._threads, job.replayed, streams)
        if job.stage is Stage.CLAIMED:  # and not cancelled or lost meanwhile
            job.prepared(request, replayed)
            job.ready()

    def prepare_here(self, job: Job) -> None:
        """The same without a thread, for a job that `is_short`."""
        request, streams = self._parts(job.claimed)
        job.prepared(request, job.replayed(streams))
        job.ready()

    def warm(self, then: Callable[[], None]) -> None:
        """Load what the first job would wait for, and call `then`, both in the background."""
        with suppress(RuntimeError):  # closed meanwhile
            self._threads.submit(self._warm, then)

    def _warm(self, then: Callable[[], None]) -> None:
        with suppress(Exception):  # the job that needs it will say what is wrong
            self.codec.stream(SamplingParams()).push(self.codec.encode("hello"), ended=True)
        with suppress(Exception):  # the same; or the model has no chat template
            self.codec.encode_chat([{"role": "user", "content": "hello"}])
        then()

    def close(self) -> None:
        """End the thread; what it is doing is finished first."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _parts(self, claimed: ClaimedJob) -> tuple[EngineRequest, list[TextStream]]:
        params = self._in_tokens(engine_params(claimed))
        request = EngineRequest(
            id=f"{claimed.id}/{claimed.attempt}",
            prompt_token_ids=_end_of(self._prompt_ids(claimed.request), params),
            params=params,
            resume=logged_tokens(claimed, params.n),
            ended=frozenset(e.choice for e in claimed.logged if e.finish_reason is not None),
            priority=PRIORITIES.get(claimed.priority, PRIORITIES["default"]),
            cache_salt=claimed.request.tenant,
        )
        return request, [self.codec.stream(params) for _ in range(params.n)]

    def _in_tokens(self, params: SamplingParams) -> SamplingParams:
        """The parameters with bad words as token ids."""
        if not params.bad_words:
            return params
        try:
            return self.codec.in_tokens(params)
        except InvalidRequest as error:
            raise BadJob(error.code, str(error)) from error

    def _prompt_ids(self, request: JobRequest) -> Sequence[int]:
        if request.adapter is not None:
            raise BadJob(
                "unknown_adapter",
                f"there is no adapter {request.adapter!r} here; leave it out to use the base model",
            )
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        try:
            if request.messages is not None:
                return self.codec.encode_chat([dict(message) for message in request.messages])
            return self.codec.encode(request.prompt or "")
        except InvalidRequest as error:
            raise BadJob(error.code, str(error)) from error
        except Exception as error:
            code = "template_error" if request.messages is not None else "tokenization_error"
            raise BadJob(code, f"{type(error).__name__}: {error}") from error


def _end_of(prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
    """What is kept of a prompt, and counted as one."""
    most = params.truncate_prompt_tokens
    return prompt if most is None else prompt[-most:]


def engine_params(claimed: ClaimedJob) -> SamplingParams:
    """The engine's parameters, with a seed that every attempt of the job shares.

    Raises:
        BadJob: a value is out of the engine's range.
    """
    sampling = claimed.request.sampling
    values = {name: getattr(sampling, name) for name in _PARAM_NAMES}
    if values["seed"] is None:
        values["seed"] = seed_of(claimed.id)
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        raise BadJob(error.code, str(error)) from error


def seed_of(job_id: str) -> int:
    """The seed of a job that brings none: the same wherever and how often it is claimed."""
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest()) >> 1


def logged_tokens(claimed: ClaimedJob, n: int) -> tuple[tuple[int, ...], ...]:
    """Output tokens that earlier attempts logged, per choice; empty on a first attempt."""
    if not claimed.logged:
        return ()
    tokens: list[list[int]] = [[] for _ in range(n)]
    for event in claimed.logged:
        if event.choice < n:
            tokens[event.choice] += event.token_ids
    return tuple(tuple(choice) for choice in tokens)


def is_short(claimed: ClaimedJob) -> bool:
    """Whether it takes less than a millisecond. Chat templates do not: the first one loads a
    library, any of them may loop."""
    request = claimed.request
    chars = len(request.prompt or "")
    return request.messages is None and chars <= INLINE_CHARS and claimed.offset <= INLINE_TOKENS
