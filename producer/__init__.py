"""The light client of tokenfleet: push generation jobs into Redis, follow their tokens.

    with Client("redis://localhost:6379/0") as client:
        job = client.submit(model="smollm2", prompt="Once upon a time")
        for event in job.stream():
            print(event.text, end="")
        print(job.result().usage)

`AsyncClient` has the same names for asyncio. All errors are `TokenfleetError`s; see errors.py.
Importing this needs redis, msgpack and opentelemetry-api, and no torch.
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
