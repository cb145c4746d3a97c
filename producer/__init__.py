"""The light client of tokenfleet: push generation jobs into Redis, follow their tokens.

Importing it needs redis, msgpack and opentelemetry-api, and no torch.
"""

from tokenfleet.producer.blocking import Client, Job
from tokenfleet.producer.client import AsyncClient, AsyncJob
from tokenfleet.producer.errors import (
    BrokerUnavailable,
    BrokerUnsupported,
    DeadlineExceeded,
    IdempotencyMismatch,
    InvalidJob,
    JobCancelled,
    JobEnded,
    JobExpired,
    JobFailed,
    KeyOccupied,
    QueueFull,
    ResultTimeout,
    StreamInterrupted,
    TokenfleetError,
    UndecodableJob,
)
from tokenfleet.producer.protocol import (
    Choice,
    Event,
    EventError,
    JobRequest,
    JobResult,
    JobStatus,
    SamplingParams,
    State,
    Timings,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "BrokerUnavailable",
    "BrokerUnsupported",
    "Choice",
    "Client",
    "DeadlineExceeded",
    "Event",
    "EventError",
    "IdempotencyMismatch",
    "InvalidJob",
    "Job",
    "JobCancelled",
    "JobEnded",
    "JobExpired",
    "JobFailed",
    "JobRequest",
    "JobResult",
    "JobStatus",
    "KeyOccupied",
    "QueueFull",
    "ResultTimeout",
    "SamplingParams",
    "State",
    "StreamInterrupted",
    "Timings",
    "TokenfleetError",
    "UndecodableJob",
    "Usage",
]
