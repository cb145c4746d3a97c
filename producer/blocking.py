"""The same client for programs without an event loop: each call drives the asyncio one.

One background thread runs the loop. A forked child starts a thread and connections of its own.

Invariant: nothing here talks to Redis; there is one implementation of the protocol.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from tokenfleet.producer.client import (
    DEFAULT_URL,
    LOG_TTL_S,
    RESULT_TTL_S,
    AsyncClient,
    AsyncJob,
)
from tokenfleet.producer.connection import Broker
from tokenfleet.producer.errors import TokenfleetError
from tokenfleet.producer.protocol import (
    MAX_JOB_BYTES,
    Event,
    JobResult,
    JobStatus,
    SamplingParams,
    State,
)
from tokenfleet.producer.stream import SILENCE_S

T = TypeVar("T")


class Client:
    """AsyncClient's names, blocking. May be used from several threads; see there for arguments."""

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
        self._client = AsyncClient(
            redis_url,
            namespace=namespace,
            tenant=tenant,
            connect_timeout_s=connect_timeout_s,
            max_job_bytes=max_job_bytes,
            result_ttl_s=result_ttl_s,
            log_ttl_s=log_ttl_s,
            partitions=partitions,
            silence_s=silence_s,
        )
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None
        self._pid = os.getpid()
        self._closed = False

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Check that Redis is there and new enough."""
        self.run(self._client.connect())

    def close(self) -> None:
        """Close connections and thread. Jobs go on."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None and self._pid == os.getpid():
            thread.run(self._client.aclose())
            thread.stop()

    def submit(
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
    ) -> Job:
        """Submit one job. Returns when Redis has it."""
        return self._handle(
            self.run(
                self._client.submit(
                    model=model,
                    prompt=prompt,
                    messages=messages,
                    prompt_token_ids=prompt_token_ids,
                    sampling=sampling,
                    priority=priority,
                    tenant=tenant,
                    deadline_s=deadline_s,
                    delay_s=delay_s,
                    max_failures=max_failures,
                    idempotency_key=idempotency_key,
                    metadata=metadata,
                    on_disconnect=on_disconnect,
                    adapter=adapter,
                    traceparent=traceparent,
                    tracestate=tracestate,
                )
            )
        )

    def submit_many(self, jobs: Iterable[Mapping[str, Any]]) -> list[Job]:
        """Submit many jobs in few round trips. Each is a mapping of submit's arguments."""
        return [self._handle(job) for job in self.run(self._client.submit_many(jobs))]

    def job(self, job_id: str) -> Job:
        """A handle on a job that was submitted anywhere."""
        return self._handle(self._client.job(job_id))

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Drive a coroutine of the asyncio client to its end."""
        return self._loop_thread(call).run(call)

    def _loop_thread(self, call: Coroutine[Any, Any, Any]) -> _LoopThread:
        with self._lock:
            if self._closed:
                call.close()
                raise TokenfleetError("this Client is closed; make a new one")
            if self._thread is None or self._pid != os.getpid():
                # a thread does not survive a fork; the asyncio client sees the new pid too
                self._thread, self._pid = _LoopThread(), os.getpid()
            return self._thread

    def _handle(self, job: AsyncJob) -> Job:
        return Job(self, job)


class Job:
    """A handle on one job, blocking. See AsyncJob for what its methods do and raise."""

    def __init__(self, client: Client, job: AsyncJob) -> None:
        self._client = client
        self._job = job
        self.id = job.id
        self.deduplicated = job.deduplicated

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    def stream(self, from_offset: int = 0) -> Iterator[Event]:
        """Every event from `from_offset` on, each once and in order, to the terminal one."""
        events: Any = self._client.run(self._open(from_offset))
        try:
            while (event := self._client.run(_next(events))) is not None:
                yield event
        finally:
            self._client.run(events.aclose())

    def status(self) -> JobStatus:
        """The job now."""
        return self._client.run(self._job.status())

    def cancel(self) -> State:
        """Ask for the end."""
        return self._client.run(self._job.cancel())

    def result(self, timeout_s: float | None = None) -> JobResult:
        """Wait for the end and return what came out."""
        return self._client.run(self._job.result(timeout_s))

    async def _open(self, from_offset: int) -> Any:
        return self._job.stream(from_offset)


async def _next(events: Any) -> Event | None:
    """The next event; None after the last. (StopAsyncIteration cannot leave a coroutine.)"""
    async for event in events:
        found: Event = event
        return found
    return None


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tokenfleet-client", daemon=True
        )
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interrupt here cancels it there."""
        if threading.current_thread() is self._thread:
            call.close()
            raise TokenfleetError("the blocking Client was called from its own loop's thread")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End loop and thread."""
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
