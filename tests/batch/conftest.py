"""Batch files, a worker without an engine, and the command line as people run it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.protocol import Choice, EventError, JobRequest, JobResult, Timings, Usage
from tokenfleet.worker.queue import ClaimedJob, JobQueue

CHAT = "/v1/chat/completions"
Answer = Callable[[JobRequest], "str | EventError | None"]


def request_line(custom_id: Any, prompt: str = "hello", **changes: Any) -> dict[str, Any]:
    """One line of a batch file; `changes` go into the body, None takes a field out."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4}
    body = {name: value for name, value in {**body, **changes}.items() if value is not None}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """A file of JSON lines; bytes and texts are written as they are."""
    with path.open("wb") as file:
        for line in lines:
            raw = line if isinstance(line, bytes) else None
            if raw is None:
                raw = (line if isinstance(line, str) else json.dumps(line)).encode()
            file.write(raw + b"\n")
    return path


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole: the last one may just be being written."""
    if not path.exists():
        return []
    *lines, _unfinished = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line]


def result_of(job: ClaimedJob, text: str) -> JobResult:
    """What a worker would say of a job."""
    choice = Choice(text=text, token_ids=tuple(text.encode()), finish_reason="stop")
    return JobResult(
        choices=(choice,) * job.request.sampling.n,
        usage=Usage(prompt_tokens=5, completion_tokens=len(text)),
        timings=Timings(queue_s=0.1, first_token_s=0.2, total_s=0.3),
        attempts=job.attempt,
        model=job.request.model,
    )


def echo(request: JobRequest) -> str:
    """The last thing that was said, backwards."""
    said = request.prompt if request.messages is None else request.messages[-1]["content"]
    return str(said)[::-1]


class Worker:
    """Claims jobs and ends them at once, each as `answer` says; None leaves it running."""

    def __init__(self, queue: JobQueue, answer: Answer) -> None:
        self._queue = queue
        self._answer = answer
        self.seen: list[JobRequest] = []
        self.held: list[ClaimedJob] = []
        """Left running."""

    async def work(self) -> None:
        while True:
            jobs = await self._queue.claim(64)
            await asyncio.gather(*(self._take(job) for job in jobs))
            if not jobs:
                await asyncio.sleep(0.005)

    async def end(self, job: ClaimedJob) -> None:
        """End a job that was left running."""
        await self._queue.finish(job, [], result_of(job, echo(job.request)))

    async def cancelled(self, job: ClaimedJob) -> None:
        """End a job that was left running as cancelled."""
        await self._queue.finish(job, [], None, state="cancelled")

    async def _take(self, job: ClaimedJob) -> None:
        self.seen.append(job.request)
        answer = self._answer(job.request)
        if answer is None:
            self.held.append(job)
        elif isinstance(answer, EventError):
            await self._queue.finish(job, [], None, state="failed", error=answer)
        else:
            await self._queue.finish(job, [], result_of(job, answer))


@pytest.fixture
def working() -> Callable[..., Any]:
    """async with working(lab, answer) as worker: a worker is up meanwhile."""

    @asynccontextmanager
    async def up(lab: Any, answer: Answer = echo, **options: Any) -> AsyncIterator[Worker]:
        worker = Worker(await lab.queue(**options), answer)
        task = asyncio.create_task(worker.work())
        yield worker
        task.cancel()
        await asyncio.wait([task])

    return up


@pytest.fixture(scope="session")
def byte_tokenizer(make_byte_model: Callable[..., Path]) -> Path:
    """A model directory without a model: every byte is a token, and a chat is what was said."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return make_byte_model(end=256, template=template)


@pytest.fixture(scope="session")
def tools() -> Any:
    """The helpers above, as attributes."""
    from types import SimpleNamespace

    return SimpleNamespace(
        request_line=request_line,
        write_lines=write_lines,
        read_json_lines=read_json_lines,
        echo=echo,
        CHAT=CHAT,
    )


@pytest.fixture
def requests(tmp_path: Path) -> Callable[..., Path]:
    """requests(7) or requests(lines): a batch file."""

    def make(lines: int | Iterable[Any], name: str = "requests.jsonl") -> Path:
        if isinstance(lines, int):
            lines = [request_line(f"c{number}", f"say {number}") for number in range(1, lines + 1)]
        return write_lines(tmp_path / name, lines)

    return make


@pytest.fixture
def outcome() -> Callable[..., Mapping[str, Any]]:
    """outcome(files): every line of both files by custom_id; each may be there only once."""

    def read(files: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in (files.output, files.errors):
            for line in read_json_lines(path):
                assert line["custom_id"] not in found, line
                found[line["custom_id"]] = line
        return found

    return read
