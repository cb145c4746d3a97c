"""The client of an asyncio program: submit jobs, follow them, ask for their results.

    async with AsyncClient("redis://localhost:6379/0") as client:
        job = await client.submit(model="smollm2", prompt="Hello")
        async for event in job.stream():
            print(event.text, end="")

Invariant: a job's id is known before it is sent, and nothing a client does by itself ends a job,
except what the job asked for with on_disconnect="cancel".
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from tokenfleet.producer import tracing
from tokenfleet.producer.checks import check_count, check_seconds, check_ttl
from tokenfleet.producer.connection import Broker, Connection
from tokenfleet.producer.errors import InvalidJob, QueueFull, TokenfleetError
from tokenfleet.producer.hub import Hub
from tokenfleet.producer.job import AsyncJob, Link
from tokenfleet.producer.keys import check_name, partition_of
from tokenfleet.producer.protocol import MAX_JOB_BYTES, JobRequest, SamplingParams
from tokenfleet.producer.stream import SILENCE_S, JobReader
from tokenfleet.producer.submission import Accepted, Submission

DEFAULT_URL = "redis://localhost:6379/0"
RESULT_TTL_S = 3600.0
LOG_TTL_S = 600.0


class AsyncClient:
    """Submits and follows jobs.

    redis_url: a URL, or a redis-py client (asyncio, asyncio cluster or blocking). It must not
        decode responses; its address and credentials are used, its pool is not.
    namespace: keeps fleets on one Redis apart.
    tenant: of the jobs submitted, where they do not say.
    connect_timeout_s: Redis out of reach for longer raises BrokerUnavailable.
    max_job_bytes: larger jobs are refused with InvalidJob.
    partitions: parts of the keyspace; None: 1, on a cluster 16. As the fleet's workers have it.
    silence_s: a stream that hears nothing for this long looks at the job's state.
    result_ttl_s, log_ttl_s: how long results and logs are kept of jobs that this client ends
        (cancelled while waiting); workers have their own settings.
    """

    def __init__(
        self,
        redis_url: Broker = DEFAULT_URL,
        *,
        namespace: str = "tokenfleet",
        tenant: str = "default",
        connect_timeout_s: float = 10.0,
        max_job_bytes: int = MAX_JOB_BYTES,
        result_ttl_s: float = RESULT_TTL_S,
        log_ttl_s: float = LOG_TTL_S,
        partitions: int | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._tenant = check_name("tenant", tenant)
        self._max_job_bytes = check_count("max_job_bytes", max_job_bytes, 1 << 32)
        self._ttls = {
            "result_ttl_s": check_ttl("result_ttl_s", result_ttl_s),
            "log_ttl_s": check_ttl("log_ttl_s", log_ttl_s),
        }
        self._silence_s = check_seconds("silence_s", silence_s)
        self._broker = redis_url
        self._options: dict[str, Any] = {
            "namespace": namespace,
            "partitions": partitions,
            "connect_timeout_s": connect_timeout_s,
        }
        self._first: Connection | None = Connection(redis_url, **self._options)
        self._link: Link | None = None
        self._shown = f"{self._first.describe()}, namespace {namespace}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._shown}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a client has connections of its own and cannot be copied or sent to another process; "
            "make one there"
        )

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def connect(self) -> None:
        """Check that Redis is there and new enough; other calls do so on their own."""
        await self.link.connection.ready()

    async def aclose(self) -> None:
        """Close the connections; streams still open end with StreamInterrupted. Jobs go on.

        A later call opens new ones, in whatever event loop it is made; close again after it.
        """
        link = self._link_here()
        self._link = None
        if link is not None:
            try:
                await link.reader.hub.aclose()
            finally:
                await link.connection.aclose()

    @property
    def link(self) -> Link:
        """The connections of this process and event loop; a forked child gets new ones."""
        link = self._link_here()
        if link is None:
            link = self._link = self._new_link(asyncio.get_running_loop())
        return link

    def _link_here(self) -> Link | None:
        """The connections that were made by this process and in this loop."""
        link = self._link
        if link is None or link.pid != os.getpid() or link.loop.is_closed():
            return None
        if link.loop is not asyncio.get_running_loop():
            raise TokenfleetError(
                "this AsyncClient belongs to another event loop; make one client per loop, "
                "or use the blocking Client from several threads"
            )
        return link

    def _new_link(self, loop: asyncio.AbstractEventLoop) -> Link:
        connection, self._first = self._first, None
        if connection is None:
            connection = Connection(self._broker, **self._options)
        reader = JobReader(connection, Hub(connection), silence_s=self._silence_s, **self._ttls)
        submission = Submission(connection, max_job_bytes=self._max_job_bytes)
        return Link(connection, submission, reader, loop, os.getpid())

    async def submit(
        self,
        *,
        model: str,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        priority: str = "default",
        tenant: str | None = None,
        deadline_s: float | None = None,
        delay_s: float = 0.0,
        max_failures: int | None = None,
        idempotency_key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_disconnect: str = "continue",
        adapter: str | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> AsyncJob:
        """Submit one job. Returns when Redis has it.

        Args:
            model: the name that workers serve; while none does, the job waits.
            prompt, messages, prompt_token_ids: exactly one: a text that is continued as it is,
                chat messages for the model's template, or token ids.
            sampling: max_tokens, temperature and so on; by default 16 tokens.
            priority: `interactive`, `default` or `batch`, the most urgent first.
            tenant: whose limits it counts for; None: the client's.
            deadline_s: expired when it has not ended this long after submission.
            delay_s: not run before this long after submission.
            max_failures: failures that it may survive; None: as the worker is set up (3).
            idempotency_key: the same key again, with the same job, gives the job that is there.
            metadata: plain values that come back in the result.
            on_disconnect: `cancel` ends the job with its last reader; `continue` does not.
            adapter: LoRA weights by name.
            traceparent, tracestate: W3C trace context; None: of the current span.

        Raises InvalidJob, IdempotencyMismatch, QueueFull, BrokerUnavailable. After
        BrokerUnavailable the job may have been accepted; an idempotency key tells.
        """
        request = JobRequest(
            model=model,
            prompt=prompt,
            messages=messages,
            prompt_token_ids=prompt_token_ids,
            sampling=SamplingParams() if sampling is None else sampling,
            priority=priority,
            tenant=self._tenant if tenant is None else tenant,
            deadline_s=deadline_s,
            delay_s=delay_s,
            max_failures=max_failures,
            idempotency_key=idempotency_key,
            metadata={} if metadata is None else metadata,
            on_disconnect=on_disconnect,
            adapter=adapter,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        link = self.link
        await link.connection.ready()
        job_id = link.submission.new_id(request)
        with tracing.sending(model, priority, job_id=job_id) as carrier:
            draft = link.submission.draft(request, carrier, job_id)
            accepted = await link.submission.send([draft])
        return self._handle(accepted[0])

    async def submit_many(self, jobs: Iterable[Mapping[str, Any] | JobRequest]) -> list[AsyncJob]:
        """Submit many jobs in few round trips. Each is a mapping of submit's arguments, or a
        JobRequest (which names its tenant itself).

        All are checked before the first is sent. Raises what submit raises; when
        IdempotencyMismatch or BrokerUnavailable comes, some may have been accepted. QueueFull says
        which: its job_ids.
        """
        if isinstance(jobs, Mapping) or not isinstance(jobs, Iterable):
            raise InvalidJob(
                "jobs", type(jobs).__name__, "must be a list of jobs; one goes to submit"
            )
        requests = [self._request(number, job) for number, job in enumerate(jobs)]
        link = self.link
        await link.connection.ready()
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[request.model, request.priority].append(number)
        handles: dict[int, AsyncJob] = {}
        full: list[QueueFull] = []
        for (model, priority), numbers in groups.items():
            with tracing.sending(model, priority, batch=len(numbers)) as carrier:
                drafts = [link.submission.draft(requests[n], carrier) for n in numbers]
                try:
                    accepted = await link.submission.send(drafts)
                except QueueFull as error:
                    full.append(error)
                    ids = zip(numbers, error.job_ids)
                    handles.update((n, self.job(job_id)) for n, job_id in ids if job_id is not None)
                    continue
            handles.update((n, self._handle(one)) for n, one in zip(numbers, accepted))
        if full:
            found = [handles.get(number) for number in range(len(requests))]
            raise QueueFull(
                max(error.retry_after_s for error in full),
                [None if job is None else job.id for job in found],
            )
        return [handles[number] for number in range(len(requests))]

    def job(self, job_id: str) -> AsyncJob:
        """A handle on a job that was submitted anywhere. Raises InvalidJob for what is no id."""
        partition_of(job_id)
        return AsyncJob(self._link_now, job_id)

    def _request(self, number: int, job: object) -> JobRequest:
        if isinstance(job, JobRequest):
            return job
        if not isinstance(job, Mapping):
            kind = type(job).__name__
            raise InvalidJob(f"job {number}", kind, "must be a mapping of submit's arguments")
        given = {name: value for name, value in job.items() if value is not None}
        try:
            return JobRequest(**{"tenant": self._tenant, **given})
        except TypeError as error:
            names = sorted(map(str, job))
            raise InvalidJob(f"job {number}", names, f"must be submit's arguments ({error})")  # noqa: B904 # says it all

    def _link_now(self) -> Link:
        return self.link

    def _handle(self, accepted: Accepted) -> AsyncJob:
        return AsyncJob(self._link_now, accepted.id, deduplicated=accepted.deduplicated)


__all__ = ["AsyncClient", "AsyncJob"]
