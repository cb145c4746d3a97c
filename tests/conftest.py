"""Real servers for the tests that need one: Valkey (embedded) and, where installed, redis-server.

Every test gets a namespace of its own, so one server of each kind serves a whole session.
A test that waits in vain ends in time, and what a test left open is its own failure.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# before anything imports triton: where no GPU is, its kernels are interpreted
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

from tokenfleet.producer.client import AsyncClient
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.errors import BrokerUnavailable
from tokenfleet.producer.keys import GROUP, Keys, keys_of
from tokenfleet.producer.protocol import Event, JobRequest
from tokenfleet.producer.submission import Submission
from tokenfleet.worker.claims import flat
from tokenfleet.worker.queue import ClaimedJob, Emission, JobQueue

from .groups import pytest_xdist_make_scheduler
from .leftovers import nobody_left, pytest_runtest_teardown, shared

# a fixture and hooks that pytest finds here
__all__ = ["nobody_left", "pytest_runtest_teardown", "pytest_xdist_make_scheduler"]

# a busy machine makes an example late, and none of them wrong
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A coroutine's time limit cancels it: the signal of pytest-timeout is raised in whichever task
    runs at that moment, and where that is not the test's own the test would wait on."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("timeout")
            limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
            item.obj = _limited(item.obj, limit_s * 0.9)


def _limited(test: Callable[..., Awaitable[None]], limit_s: float) -> Callable[..., Any]:
    @functools.wraps(test)
    async def limited(*args: Any, **fixtures: Any) -> None:
        async with asyncio.timeout(limit_s):
            await test(*args, **fixtures)

    return limited


def pytest_configure() -> None:
    """A shell's background jobs are deaf to Ctrl-C, and so would be all that tests start there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is there before the first test is not looked at again for garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """At the exit everything is garbage: what the compiler's bindings then miss they list, at
    length."""
    gc.unfreeze()


class Lab:
    """One namespace on a server: makes queues and jobs, and looks behind the scenes."""

    def __init__(self, server: EmbeddedServer, **options: Any) -> None:
        self.server = server
        self.namespace = f"t{next(_numbers)}"
        self.options = {"namespace": self.namespace, **options}
        self.connection = Connection(server.url, **self.options)
        self.submission = Submission(self.connection)
        self._open: list[JobQueue | AsyncClient] = []

    @property
    def raw(self) -> Any:
        """A redis-py client."""
        return self.connection.client

    @property
    def keys(self) -> Keys:
        return self.connection.keys(0)

    async def queue(self, worker_id: str = "w1", **options: Any) -> JobQueue:
        given = {"model_name": "m", "lease_s": 30.0, "uniform": lambda: 1.0, **options}
        queue = JobQueue(self.server.url, namespace=self.namespace, worker_id=worker_id, **given)
        self._open.append(queue)
        await queue.ensure()
        return queue

    def client(self, **options: Any) -> AsyncClient:
        client = AsyncClient(self.server.url, **{**self.options, **options})
        self._open.append(client)
        return client

    async def submit(self, **fields: Any) -> str:
        """One job of model `m`; returns its id."""
        request = JobRequest(**{"model": "m", "prompt": "x", **fields})
        return (await self.submission.send([self.submission.draft(request)]))[0].id

    async def fields(self, job_id: str) -> dict[str, str]:
        found = await self.connection.execute(
            "HGETALL", keys_of(self.namespace, job_id).job(job_id)
        )
        return {k.decode(): v.decode(errors="replace") for k, v in found.items()}

    async def state(self, job_id: str) -> str | None:
        return (await self.fields(job_id)).get("state")

    async def log(self, job_id: str) -> list[Event]:
        log = keys_of(self.namespace, job_id).events(job_id)
        entries = await self.connection.execute("XRANGE", log, "-", "+")
        return [Event.unpack(fields[b"d"]) for _, fields in entries]

    async def server_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.raw.time()
        return int(seconds * 1000 + micros // 1000)

    async def expire_lease(self, job: ClaimedJob) -> None:
        """Make the job's lease look as if nobody had renewed it for an hour."""
        owner = await self.raw.xpending_range(job.stream, GROUP, job.entry, job.entry, 1)
        await self.raw.xclaim(
            job.stream, GROUP, owner[0]["consumer"], 0, [job.entry], idle=3_600_000, justid=True
        )

    async def blocked(self, client_id: int) -> bool:
        """Whether the server lets that connection wait in a blocking command."""
        found = await self.raw.client_list(client_id=[client_id])
        return any("b" in client["flags"] for client in found)

    async def entries(self, model: str = "m") -> int:
        """Entries in all of the model's queues."""
        found = await self.raw.keys(f"{self.keys.prefix}:q:{model}:*")
        return sum([await self.raw.xlen(key) for key in found])

    def token(self, offset: int, *ids: int, attempt: int = 1, **more: Any) -> Event:
        """An event of some tokens; of one that is its offset, where none is given."""
        ids = ids or (offset,)
        text = "".join(f"{i} " for i in ids)
        return Event(offset=offset, token_ids=ids, text=text, attempt=attempt, **more)

    def emission(self, job: ClaimedJob, start: int, *events: Event) -> Emission:
        """The events as a worker sends them."""
        return job.id, job.attempt, [start, *flat(events)[1:]]

    async def until(self, check: Callable[[], Awaitable[bool]]) -> None:
        """Ask the server again and again; the test's timeout ends a wait in vain."""
        while not await check():  # noqa: ASYNC110  # the server has no event to wait for
            await asyncio.sleep(0.005)

    async def claim_when_back(self, queue: JobQueue, count: int) -> list[ClaimedJob]:
        """Claim as a worker does: again after each failure that a lost connection causes."""
        while True:
            try:
                return await queue.claim(count)
            except BrokerUnavailable:
                await asyncio.sleep(0.01)

    async def aclose(self) -> None:
        for one in self._open:
            await one.aclose()
        await self.connection.aclose()


@pytest.fixture(scope="session")
def valkey(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with shared(EmbeddedServer(), request.session) as server:
        yield server


@pytest.fixture(scope="session")
def redis_binary() -> Path:
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not installed; apt-get install redis-server runs these too")
    return Path(found)


@pytest.fixture(scope="session")
def redis_server(redis_binary: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with shared(EmbeddedServer(binary=redis_binary), request.session) as server:
        yield server


@pytest.fixture(params=["valkey", "redis"])
def any_server(request: pytest.FixtureRequest) -> EmbeddedServer:
    """The same test on both kinds of server."""
    name = {"valkey": "valkey", "redis": "redis_server"}[request.param]
    server: EmbeddedServer = request.getfixturevalue(name)
    return server


@pytest.fixture
async def lab(any_server: EmbeddedServer) -> AsyncIterator[Lab]:
    """A namespace on each kind of server in turn."""
    lab = Lab(any_server)
    yield lab
    await lab.aclose()


@pytest.fixture
async def valkey_lab(valkey: EmbeddedServer) -> AsyncIterator[Lab]:
    """A namespace on the embedded server."""
    lab = Lab(valkey)
    yield lab
    await lab.aclose()


@pytest.fixture
async def own_lab(tmp_path: Path) -> AsyncIterator[Lab]:
    """A server of the test's own, with an append-only file, to stop and start."""
    with EmbeddedServer(data_dir=tmp_path, options=["--appendfsync", "always"]) as server:
        lab = Lab(server)
        yield lab
        await lab.aclose()


@pytest.fixture
async def bare_lab() -> AsyncIterator[Lab]:
    """A server of the test's own that keeps nothing, to weigh."""
    with EmbeddedServer() as server:
        lab = Lab(server)
        yield lab
        await lab.aclose()


@pytest.fixture
def make_lab(valkey: EmbeddedServer) -> Callable[[], Lab]:
    """For tests that run their own event loop and make many namespaces."""
    return lambda: Lab(valkey)


@pytest.fixture
def until() -> Callable[..., Any]:
    """until(check): wait until check(), or what it awaits, is true; the time limit ends a test."""

    async def wait(check: Callable[[], Any]) -> Any:
        while True:
            found = check()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.005)

    return wait


@pytest.fixture
def rung() -> Callable[..., Any]:
    """await rung(queue): it is woken. A bell that has run out meanwhile is waited for again."""

    async def wait(queue: Any) -> None:
        while not await queue.wait(60):
            pass

    return wait


@pytest.fixture(scope="session")
def make_byte_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_byte_model(specials=("</s>",), end=None, template=None) -> a directory without weights.

    Id b is byte b, the special tokens follow; `end` is the EOS id, `template` that of chats.
    """

    def make(
        specials: Sequence[str] = ("</s>",), end: int | None = None, template: str | None = None
    ) -> Path:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        path = tmp_path_factory.mktemp("bytes")
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        letters = [chr(b if b in printable else next(others)) for b in range(256)]
        vocab = {letter: number for number, letter in enumerate([*letters, *specials])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
        tokenizer.save(str(path / "tokenizer.json"))
        if end is not None:
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        if template is not None:
            (path / "chat_template.jinja").write_text(template)
        return path

    return make
