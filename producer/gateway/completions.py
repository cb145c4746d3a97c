"""/v1/chat/completions and /v1/completions: one request is one job.

A job asked for here ends when its last reader has gone, unless the request says otherwise
(`Tokenfleet-On-Disconnect: continue`, `store: true`, or an `Idempotency-Key`: who sends one means
to ask again after a lost connection, and is to find the job and not its cancellation). Such a job
can be read again, from the last event seen (`Last-Event-ID`) or as a whole (GET with the id of the
response).

Invariant: a reader sees jobs of its own tenant only; what is another's does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tokenfleet.producer import tracing
from tokenfleet.producer.batch import (
    CHAT,
    COMPLETIONS,
    ResponseShape,
    TranslatedRequest,
    translate_request,
)
from tokenfleet.producer.errors import InvalidJob, JobExpired
from tokenfleet.producer.gateway.answers import GONE, refused
from tokenfleet.producer.gateway.api_keys import Caller
from tokenfleet.producer.gateway.body import json_body
from tokenfleet.producer.gateway.chunks import Completion, Place, created_s
from tokenfleet.producer.gateway.context import (
    Gateway,
    caller_of,
    gateway_of,
    note,
    passage_of,
)
from tokenfleet.producer.gateway.models import require_model
from tokenfleet.producer.gateway.readers import Alarm, JobFrames, awaited
from tokenfleet.producer.gateway.sse import EventStream, Peeked
from tokenfleet.producer.job import AsyncJob
from tokenfleet.producer.keys import PRIORITIES, keys_of, partition_of
from tokenfleet.producer.protocol import Event, JobResult

OPEN_WAIT_S = 1.0
"""A stream whose job fails within this time answers with a status instead."""
TIERS: Mapping[str, str] = {"flex": "batch", "priority": "interactive"}
"""What `service_tier` means; any other value is the gateway's own class."""
MOST_LOGPROBS = 20
"""A response that is fetched again shows what alternatives there are."""


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    return await _complete(request, CHAT)


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    return await _complete(request, COMPLETIONS)


async def fetch_chat(request: Request) -> Response:
    """GET /v1/chat/completions/{id}."""
    return await _fetch(request, CHAT)


async def fetch_completion(request: Request) -> Response:
    """GET /v1/completions/{id}."""
    return await _fetch(request, COMPLETIONS)


async def _complete(request: Request, endpoint: str) -> Response:
    caller, gateway = caller_of(request), gateway_of(request)
    body = await json_body(request, gateway.settings.max_body_bytes)
    asked = translate_request(endpoint, body, streams=True)
    note(request, model=asked.model, stream=asked.stream)
    place = _last_seen(request)
    if place is not None:
        shape = await _shape_of(gateway, caller, place.job_id, endpoint, asked.shape)
        return await _streamed(request, place, shape, include_usage=asked.include_usage)
    await require_model(gateway, asked.model)
    deadline_s = _deadline_s(request) or gateway.settings.deadline_s
    job = await _submitted(request, caller, asked, body, deadline_s)
    passage_of(request).submitted_at = gateway.metrics.clock()
    note(request, job_id=job.id)
    request.state.request_id = job.id
    if asked.stream:
        return await _streamed(
            request,
            Place(job.id),
            asked.shape,
            include_usage=asked.include_usage,
            deadline_s=deadline_s,
        )
    with closing(Alarm(gateway, job.id, deadline_s)):
        result = await awaited(request, job)
    note(request, **_counts(result))
    found = asked.shape.body(result, job_id=job.id, created_s=created_s(job.id))
    return JSONResponse(found)


def _counts(result: JobResult) -> dict[str, int]:
    usage = result.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }


async def _submitted(
    request: Request,
    caller: Caller,
    asked: TranslatedRequest,
    body: Mapping[str, Any],
    deadline_s: float | None,
) -> AsyncJob:
    key = request.headers.get("idempotency-key")
    keeps = body.get("store") is True or key is not None
    on_disconnect = request.headers.get("tokenfleet-on-disconnect")
    with tracing.continuing(request.headers):
        return await gateway_of(request).client.submit(
            **asked.job,
            tenant=caller.tenant,
            priority=_priority(request, caller, body),
            deadline_s=deadline_s,
            on_disconnect=on_disconnect or ("continue" if keeps else "cancel"),
            idempotency_key=key,
        )


def _priority(request: Request, caller: Caller, body: Mapping[str, Any]) -> str:
    """By header, service_tier or setting; never more urgent than the key allows."""
    asked = request.headers.get("tokenfleet-priority") or TIERS.get(str(body.get("service_tier")))
    if asked is None:
        default = gateway_of(request).settings.priority
        return default if caller.may(default) else caller.priority
    if asked not in PRIORITIES:
        known = ", ".join(PRIORITIES)
        raise refused(400, "invalid_value", f"must be one of {known}", "Tokenfleet-Priority")
    if not caller.may(asked):
        message = f"this key may ask for priority {caller.priority} at most, not {asked}"
        raise refused(403, "priority_not_allowed", message, "Tokenfleet-Priority")
    return asked


def _deadline_s(request: Request) -> float | None:
    said = request.headers.get("tokenfleet-deadline-s")
    if said is None:
        return None
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds < math.inf:
        message = "must be the seconds that the request has, a positive number"
        raise refused(400, "invalid_value", message, "Tokenfleet-Deadline-S")
    return seconds


def _last_seen(request: Request) -> Place | None:
    said = request.headers.get("last-event-id")
    return Place.read(said) if said else None


async def _streamed(
    request: Request,
    place: Place,
    shape: ResponseShape,
    *,
    include_usage: bool,
    deadline_s: float | None = None,
) -> Response:
    gateway = gateway_of(request)
    request.state.request_id = place.job_id
    clock, notes, passage = gateway.metrics.clock, request.state.notes, passage_of(request)
    began = clock()
    notes.update(job_id=place.job_id, completion_tokens=0)

    def count(event: Event) -> None:
        if event.token_ids:
            if passage.first_token_at is None:
                passage.first_token_at = clock()
                notes["ttft_ms"] = round((passage.first_token_at - began) * 1000, 1)
            notes["completion_tokens"] += len(event.token_ids)

    job = gateway.client.job(place.job_id)
    completion = Completion(job, shape, place, include_usage, count)
    frames = JobFrames(gateway, completion, Alarm(gateway, place.job_id, deadline_s))
    source = await Peeked.open(frames, OPEN_WAIT_S)
    return EventStream(
        source,
        keep_alive_s=gateway.settings.keep_alive_s,
        on_gone=lambda: note(request, error=GONE),
    )


async def _fetch(request: Request, endpoint: str) -> Response:
    """A response again: a stream with `?stream=true`, otherwise as a whole once it has ended."""
    caller, gateway = caller_of(request), gateway_of(request)
    response_id = request.path_params["response_id"]
    place = _last_seen(request) or Place(_job_id(response_id))
    shape = await _shape_of(gateway, caller, place.job_id, endpoint, None)
    if request.query_params.get("stream") == "true":
        usage = request.query_params.get("include_usage") == "true"
        return await _streamed(request, place, shape, include_usage=usage)
    job = gateway.client.job(place.job_id)
    note(request, job_id=job.id)
    status = await job.status()
    if not status.state.terminal:
        message = (
            f"the job is {status.state} at {status.offset} tokens; come again, or add ?stream=true"
        )
        raise refused(409, "not_ended", message)
    result = await job.result(timeout_s=gateway.client.link.connection.connect_timeout_s)
    return JSONResponse(shape.body(result, job_id=job.id, created_s=created_s(job.id)))


async def _shape_of(
    gateway: Gateway, caller: Caller, job_id: str, endpoint: str, asked: ResponseShape | None
) -> ResponseShape:
    """How to show a job that is there already. Raises JobExpired when it is not the caller's."""
    connection = gateway.client.link.connection
    name = keys_of(connection.namespace, job_id).job(job_id)
    tenant, model = await connection.execute("HMGET", name, "tenant", "model")
    if tenant is None or tenant.decode() != caller.tenant:
        raise JobExpired(job_id)
    logprobs = MOST_LOGPROBS if asked is None else asked.logprobs
    return ResponseShape(endpoint, model.decode(), logprobs)


def _job_id(response_id: str) -> str:
    """The job of a response. Raises GatewayError 404."""
    job_id = response_id.partition("-")[2] if response_id.startswith("c") else response_id
    try:
        partition_of(job_id)
    except InvalidJob:
        raise refused(404, "not_found", f"there is no response {response_id[:80]!r}") from None
    return job_id
