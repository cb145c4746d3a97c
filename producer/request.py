"""The job as a producer asks for it: checked once, where it is made.

Invariant: `JobRequest.unpack(job.pack()) == job`, and a JobRequest that exists is valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenfleet.producer import wire
from tokenfleet.producer.checks import (
    MOST_S,
    are_token_ids,
    check_plain,
    is_int,
    is_number,
    is_text,
)
from tokenfleet.producer.errors import InvalidJob, UndecodableJob
from tokenfleet.producer.keys import PRIORITIES, check_model, check_name
from tokenfleet.producer.sampling_params import SamplingParams

MAX_JOB_BYTES = 256 * 1024
"""Largest packed job, unless the client is told otherwise."""

_ON_DISCONNECT = ("continue", "cancel")


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What was asked. Written once at submission; no one changes it."""

    model: str
    """The name that workers serve; one without a worker waits for one."""
    prompt: str | None = field(default=None, repr=False)
    """Exactly one of prompt, messages, prompt_token_ids is set. They stay out of the repr: logs."""
    messages: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    """Chat messages; the worker applies the model's chat template. A tuple once it is made."""
    prompt_token_ids: Sequence[int] | None = field(default=None, repr=False)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: str = "default"
    tenant: str = "default"
    deadline_s: float | None = None
    """Counted from submission by the server's clock; after it the job is expired."""
    delay_s: float = 0.0
    """Not claimed before this long after submission."""
    max_failures: int | None = None
    """Failures that the job may survive; None: as the worker is set up (3)."""
    idempotency_key: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Carried along, never looked at."""
    on_disconnect: str = "continue"
    """`cancel`: the job ends when its last subscriber has gone; `continue`: it does not."""
    traceparent: str | None = None
    """W3C trace context; a malformed one is ignored by whoever reads it."""
    tracestate: str | None = None
    adapter: str | None = None
    """LoRA weights to apply."""

    def __post_init__(self) -> None:
        _check_target(self)
        _check_prompt(self)
        _check_times(self)
        _check_carried(self)

    def pack(self, max_bytes: int = MAX_JOB_BYTES, trace: Mapping[str, str] | None = None) -> bytes:
        """The bytes for Redis. Raises InvalidJob above `max_bytes`.

        `trace`: a carrier with traceparent and tracestate, put in place of the job's own.
        """
        fields = wire.wire_of(self, but="sampling")
        if sampling := self.sampling.to_wire():
            fields["sampling"] = sampling
        packed = wire.pack({**fields, **(trace or {})})
        if len(packed) > max_bytes:
            raise InvalidJob(
                "job",
                f"{len(packed)} bytes",
                f"must pack into {max_bytes} bytes; shorten the prompt or metadata, "
                "or raise max_job_bytes",
            )
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> JobRequest:
        """Back from `pack`. Raises UndecodableJob, never anything else."""
        found = wire.unpack(packed, "job")
        try:
            if "sampling" in found:
                found["sampling"] = SamplingParams.from_wire(found["sampling"])
        except InvalidJob as error:
            raise UndecodableJob(error.field, error.value, error.way_out) from error
        except (TypeError, ValueError) as error:
            raise UndecodableJob("sampling", str(error), "must be a map of parameters") from error
        return wire.build(cls, found, "job")


def _check_target(job: JobRequest) -> None:
    check_model(job.model)
    if not isinstance(job.priority, str) or job.priority not in PRIORITIES:
        raise InvalidJob("priority", job.priority, f"must be one of {', '.join(PRIORITIES)}")
    check_name("tenant", job.tenant)
    if job.adapter is not None and not (is_text(job.adapter) and job.adapter):
        raise InvalidJob("adapter", job.adapter, "must be the name of an adapter, or None")
    if not isinstance(job.on_disconnect, str) or job.on_disconnect not in _ON_DISCONNECT:
        raise InvalidJob("on_disconnect", job.on_disconnect, "must be 'continue' or 'cancel'")
    if not isinstance(job.sampling, SamplingParams):
        raise InvalidJob("sampling", job.sampling, "must be SamplingParams")


def _check_prompt(job: JobRequest) -> None:
    names = ("prompt", "messages", "prompt_token_ids")
    given = [name for name in names if getattr(job, name) is not None]
    if len(given) != 1:
        raise InvalidJob("prompt", given, f"exactly one of {', '.join(names)} must be given")
    value = getattr(job, given[0])
    if job.prompt is not None and not isinstance(value, str):
        raise InvalidJob("prompt", _kind(value), "must be text; token ids go into prompt_token_ids")
    if job.prompt is None and not isinstance(value, list | tuple):
        raise InvalidJob(given[0], _kind(value), "must be a list")
    if not value:
        raise InvalidJob(given[0], value, "must not be empty")
    if job.prompt is None:
        object.__setattr__(job, given[0], tuple(value))
    if job.prompt_token_ids is not None:
        if not are_token_ids(job.prompt_token_ids):
            raise InvalidJob(
                "prompt_token_ids", value, "must hold token ids, integers of 0 or more"
            )
        return
    if job.messages is not None:
        _check_messages(job.messages)
    check_plain(given[0], getattr(job, given[0]))


def _check_messages(messages: Sequence[object]) -> None:
    way_out = "must hold mappings with a role and a content"
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidJob("messages", _kind(message), way_out)
        names = message.keys()
        if not isinstance(message.get("role"), str) or not names & {"content", "tool_calls"}:
            raise InvalidJob("messages", f"one with {sorted(map(str, names))}", way_out)


def _kind(value: object) -> str:
    """What stands for a prompt in an error, which may be logged: never its text."""
    return f"a value of type {type(value).__name__}"


def _check_times(job: JobRequest) -> None:
    for name, low in (("deadline_s", 0.001), ("delay_s", 0.0)):
        value = getattr(job, name)
        if name == "deadline_s" and value is None:
            continue
        if not is_number(value) or not low <= value <= MOST_S:
            raise InvalidJob(name, value, f"must be seconds, {low:g} or more and at most ten years")
    failures = job.max_failures
    if failures is not None and not (is_int(failures) and 0 <= failures <= 1000):
        raise InvalidJob("max_failures", failures, "must lie between 0 and 1000, or be None")


def _check_carried(job: JobRequest) -> None:
    key = job.idempotency_key
    if key is not None and not (is_text(key) and 1 <= len(key) <= 256):
        raise InvalidJob("idempotency_key", key, "must be a text of 1 to 256 characters, or None")
    for name in ("traceparent", "tracestate"):
        if getattr(job, name) is not None and not is_text(getattr(job, name)):
            raise InvalidJob(name, getattr(job, name), "must be a text, or None")
    if not isinstance(job.metadata, Mapping):
        raise InvalidJob("metadata", job.metadata, "must be a mapping")
    check_plain("metadata", job.metadata)
