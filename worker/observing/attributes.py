"""What is written on a job's spans: where it came from, what was asked, what came of it.

Nothing of what a job says is among it; names stand in producer/semconv.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.util.types import AttributeValue

from tokenfleet.producer import semconv
from tokenfleet.producer.keys import GROUP, partition_of

if TYPE_CHECKING:
    from tokenfleet.producer.protocol import JobResult
    from tokenfleet.worker.queue import ClaimedJob


def of_process(job: ClaimedJob, worker_id: str) -> dict[str, AttributeValue]:
    """Which job of which queue, and who took it."""
    return {
        semconv.MESSAGING_SYSTEM: semconv.MESSAGING_SYSTEM_REDIS,
        semconv.MESSAGING_OPERATION_NAME: semconv.PROCESS,
        semconv.MESSAGING_OPERATION_TYPE: semconv.PROCESS,
        semconv.MESSAGING_DESTINATION_NAME: semconv.queue_name(job.request.model, job.priority),
        semconv.MESSAGING_DESTINATION_PARTITION_ID: str(partition_of(job.id)),
        semconv.MESSAGING_CONSUMER_GROUP_NAME: GROUP,
        semconv.MESSAGING_MESSAGE_ID: job.id,
        semconv.MESSAGING_CLIENT_ID: worker_id,
        semconv.JOB_ATTEMPT: job.attempt,
        semconv.JOB_PRIORITY: job.priority,
        semconv.JOB_TENANT: job.request.tenant,
    }


def labels(operation: str, model: str) -> dict[str, str]:
    """What a job's spans and metrics both carry: few values each."""
    return {
        semconv.GEN_AI_OPERATION_NAME: operation,
        semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER,
        semconv.GEN_AI_REQUEST_MODEL: model,
    }


def of_operation(job: ClaimedJob, operation: str) -> dict[str, AttributeValue]:
    """What was asked for; optional parameters only where they were given."""
    asked = job.request.sampling
    attributes: dict[str, AttributeValue | None] = {
        **labels(operation, job.request.model),
        semconv.GEN_AI_RESPONSE_ID: job.id,
        semconv.GEN_AI_REQUEST_MAX_TOKENS: asked.max_tokens,
        semconv.GEN_AI_REQUEST_TEMPERATURE: asked.temperature,
        semconv.GEN_AI_REQUEST_TOP_P: asked.top_p,
        semconv.GEN_AI_REQUEST_TOP_K: asked.top_k if asked.top_k > 0 else None,
        semconv.GEN_AI_REQUEST_SEED: _int64(asked.seed),
        semconv.GEN_AI_REQUEST_CHOICE_COUNT: asked.n if asked.n > 1 else None,
        semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY: asked.frequency_penalty or None,
        semconv.GEN_AI_REQUEST_PRESENCE_PENALTY: asked.presence_penalty or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _int64(seed: int | None) -> int | None:
    """A seed as OTLP can carry it: attributes are signed, seeds reach up to 2**64."""
    return seed if seed is None or seed < 2**63 else seed - 2**64


def of_result(result: JobResult) -> dict[str, AttributeValue]:
    """What the job came to."""
    return {
        semconv.GEN_AI_RESPONSE_MODEL: result.model,
        semconv.GEN_AI_RESPONSE_FINISH_REASONS: [c.finish_reason or "" for c in result.choices],
        semconv.GEN_AI_USAGE_INPUT_TOKENS: result.usage.prompt_tokens,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: result.usage.completion_tokens,
    }
