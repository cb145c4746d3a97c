"""The same client for programs without an event loop: each call drives the asyncio one.

One background thread runs the loop. A forked child starts a thread and connections of its own; what
the parent was reading stays the parent's.

Invariant: nothing here talks to Redis; there is one implementation of the protocol.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from tokenfleet.producer.client import (
    DEFAULT_URL,
    LOG_TTL_S,
    RESULT_TTL_S,
    AsyncClient,
    AsyncJob,
)
from tokenfleet.producer.connection import Broker
from tokenfleet.producer.errors import StreamInterrupted, TokenfleetError
from tokenfleet.producer.job import NOT_SENT
from tokenfleet.producer.protocol import (
    MAX_JOB_BYTES,
    Event,
    JobRequest,
    JobResult,
    JobStatus,
    SamplingParams,
    State,
)
from tokenfleet.producer.stream import SILENCE_S

T = TypeVar("T")


class _ClientClosed(TokenfleetError):
    """The call cannot be made, or could not be ended."""

    def __init__(self) -> None:
        super().__init__("this Client is closed; make a new one")


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
        _clients.add(self)

    def __repr__(self) -> str:
        return repr(self._client).replace(type(self._client).__name__, type(self).__name__)

    def __reduce__(self) -> NoReturn:
        self._client.__reduce__()

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
        """Close connections and thread; other threads' calls end with an error. Jobs go on."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is not None and self._pid == os.getpid():
            thread.stop(self._client)

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
        """Submit one job. Returns when Redis has it.

        Arguments and errors are those of `AsyncClient.submit`.
        """
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

    def submit_many(self, jobs: Iterable[Mapping[str, Any] | JobRequest]) -> list[Job]:
        """Submit many jobs in few round trips. Each is a mapping of submit's arguments, or a
        JobRequest. Errors are those of `AsyncClient.submit_many`.
        """
        if not isinstance(jobs, Mapping) and isinstance(jobs, Iterable):
            jobs = list(jobs)  # a generator runs in its caller's thread
        return [self._handle(job) for job in self.run(self._client.submit_many(jobs))]

    def job(self, job_id: str) -> Job:
        """A handle on a job that was submitted anywhere."""
        return self._handle(self._client.job(job_id))

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Drive a coroutine of the asyncio client to its end."""
        try:
            thread = self._loop_thread()
        except TokenfleetError:
            call.close()
            raise
        return thread.run(call)

    def leave(self, call: Coroutine[Any, Any, None]) -> None:
        """Drive a coroutine that gives something back, where there is anything left to give."""
        thread = self._thread
        if thread is None:
            call.close()
        else:
            thread.leave(call)

    def _loop_thread(self) -> _LoopThread:
        with self._lock:
            if self._closed:
                raise _ClientClosed()
            if self._thread is None or self._pid != os.getpid():
                # a thread does not survive a fork; the asyncio client sees the new pid too
                self._thread, self._pid = _LoopThread(), os.getpid()
                forgotten = weakref.finalize(self, self._thread.abandon, self._client)
                forgotten.atexit = False  # the thread is a daemon, and sockets end with the process
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

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_SENT)

    def stream(self, from_offset: int = 0) -> Generator[Event, None, None]:
        """Every event from `from_offset` on, each once and in order, to the terminal one.

        In a forked child a stream of its parent raises StreamInterrupted.
        """
        opened_by, offset = os.getpid(), from_offset
        events: Any = self._client.run(self._open(from_offset))
        try:
            while True:
                if os.getpid() != opened_by:
                    raise StreamInterrupted(self.id, offset, "a forked child has to open its own")
                try:
                    event = self._client.run(_next(events))
                except _ClientClosed as error:
                    raise StreamInterrupted(self.id, offset, str(error)) from error
                if event is None:
                    return
                offset = event.end
                yield event
        finally:
            if os.getpid() == opened_by:
                self._client.leave(events.aclose())

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
    """An event loop in a daemon thread.

    Invariant: a call that was let in ends, at the latest as the thread does.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tokenfleet-client", daemon=True)
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interrupt here cancels it there."""
        if threading.current_thread() is self._thread:
            call.close()
            raise TokenfleetError("the blocking Client was called from its own loop's thread")
        with self._lock:
            if self._stopped:
                call.close()
                raise _ClientClosed()
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise _ClientClosed() from None  # nobody else cancels it
        except BaseException:
            future.cancel()
            raise

    def leave(self, call: Coroutine[Any, Any, None]) -> None:
        """The same for what gives something back: there is nothing left once the thread ends. The
        collector may ask for it in any thread, in this one too."""
        if threading.current_thread() is self._thread:
            self._loop.create_task(call)
            return
        with suppress(_ClientClosed):
            self.run(call)

    def stop(self, client: AsyncClient) -> None:
        """Close the client, end what is under way, and the thread."""
        ended = self.abandon(client)
        self._thread.join()
        if ended is not None:
            ended.result()

    def abandon(self, client: AsyncClient) -> Future[None] | None:
        """The same, not waiting for it. None where somebody else does it."""
        if self._pid != os.getpid():
            return None
        with self._lock:
            if self._stopped:
                return None
            self._stopped = True
            return asyncio.run_coroutine_threadsafe(self._end(client), self._loop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self, client: AsyncClient) -> None:
        try:
            await client.aclose()
        finally:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:  # they are told that the client is closed
                await asyncio.wait(others, timeout=_LAST_WORDS_S)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                await asyncio.wait([task], timeout=_LAST_WORDS_S)
            await self._loop.shutdown_asyncgens()
            self._loop.call_later(0, self._loop.stop)  # behind what tells others of their ends


_LAST_WORDS_S = 1.0

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _unlocked() -> None:
    """A forked child must not wait for a thread that only its parent has."""
    for client in list(_clients):
        client._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlocked)
