"""Every way that leads to a Redis, and whole workers on it.

A `Site` is one way in: what clients and workers are given as redis_url. Its workers are real, but
for an engine that lives in this process and repeats the prompt: every gap and doublet shows.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.request import EngineRequest
from tokenfleet.producer import AsyncClient, AsyncJob, Event, JobResult, SamplingParams
from tokenfleet.producer.connection import Connection
from tokenfleet.producer.embedded import EmbeddedServer, answers, free_port
from tokenfleet.worker.engine_link.engine_process import Batch, EngineInfo, StepEvent
from tokenfleet.worker.engine_link.simulated import SimulatedCore
from tokenfleet.worker.service import WorkerService
from tokenfleet.worker.settings import load_settings

MODEL = "m"
SLOTS = 16384
_numbers = itertools.count(1)


class LocalEngine:
    """An engine without a process: SimulatedCore, a step each `step_s`."""

    def __init__(self, slots: int, step_s: float) -> None:
        config = EngineConfig(model=".", max_num_seqs=slots)
        self.core = SimulatedCore(config, step_s, sleep=lambda _: None)
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.last_heard = time.monotonic()
        self.stepped = False
        self.pid = 0
        self.steps = 0
        self._work = asyncio.Event()
        self._over = False

    async def start(self) -> EngineInfo:
        return EngineInfo(self.core.config.max_num_seqs, self.core.max_len, 0.0, 0.0)

    def add(self, request: EngineRequest) -> None:
        self.core.add(request)
        self._work.set()

    def abort(self, id: str, choice: int | None = None) -> None:
        self.core.abort(id, choice)
        self._work.set()

    async def batches(self) -> AsyncIterator[Batch]:
        while True:
            await self._work.wait()
            await self.may_step.wait()
            if self._over:
                return
            if not self.core.has_work:
                self._work.clear()
                continue
            events = [
                StepEvent(e.id, e.choice, list(e.token_ids), e.finish_reason)
                for e in self.core.step()
            ]
            self.stepped, self.last_heard = True, time.monotonic()
            self.steps += 1
            yield Batch(events, [], self.core.stats, [])
            await asyncio.sleep(self.core.step_s)

    async def cause_of_death(self) -> str:
        return "stopped"

    async def stop(self) -> None:
        self._over = True
        self._work.set()
        self.may_step.set()

    async def kill(self) -> int:
        await self.stop()
        return -9


@dataclass(slots=True)
class Worker:
    """A worker in this process."""

    service: WorkerService
    run: asyncio.Task[int]
    engines: list[LocalEngine]

    @property
    def engine(self) -> LocalEngine:
        return self.engines[-1]

    async def die(self) -> None:
        """End without a word, as a killed process does."""
        self.run.cancel()
        await asyncio.gather(self.run, return_exceptions=True)

    async def drain(self) -> int:
        self.service.drain()
        return await self.run


class Site:
    """One way in, with a namespace of its own."""

    def __init__(
        self,
        url: str,
        model: Path,
        *,
        worker_url: str | None = None,
        our_url: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self.url = url
        self.worker_url = worker_url or url
        self.namespace = namespace or f"s{next(_numbers)}"
        self.connection = Connection(our_url or url, namespace=self.namespace)
        self.client = AsyncClient(
            self.url, namespace=self.namespace, connect_timeout_s=30.0, silence_s=0.5
        )
        self._model = model
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self.connection.aclose)
        self._stack.push_async_callback(self.client.aclose)

    def worker(self, *, step_s: float = 0.002, **settings: Any) -> Worker:
        values = {"max_num_seqs": 8, "prefetch": 0, "flush_interval_ms": 4, "lease_s": 20}
        values |= settings
        engines: list[LocalEngine] = []

        def make_engine() -> Any:
            engines.append(LocalEngine(values["max_num_seqs"], step_s))
            return engines[-1]

        service = WorkerService(
            load_settings(
                redis_url=self.worker_url,
                namespace=self.namespace,
                model=str(self._model),
                model_name=MODEL,
                **values,
            ),
            make_engine=make_engine,
        )
        worker = Worker(service, asyncio.ensure_future(service.run()), engines)
        self._stack.push_async_callback(worker.die)
        return worker

    async def submit(self, prompt: str, max_tokens: int, **fields: Any) -> AsyncJob:
        sampling = SamplingParams(max_tokens=max_tokens, n=fields.pop("n", 1))
        return await self.client.submit(model=MODEL, prompt=prompt, sampling=sampling, **fields)

    async def follow(self, job: AsyncJob) -> list[Event]:
        """To the end, checked against the result."""
        events = [event async for event in job.stream()]
        check_stream(events, await job.result(timeout_s=10.0))
        return events

    async def pending(self) -> int:
        """Entries left in all queues of all partitions."""
        left = 0
        for partition in range(self.connection.partitions):
            names = self.connection.keys(partition)
            for priority in ("interactive", "default", "batch"):
                for key in (names.queue(MODEL, priority), names.front(MODEL, priority)):
                    left += await self.connection.execute("XLEN", key)
        return left

    async def close(self) -> None:
        await self._stack.aclose()


class Proxy:
    """A TCP proxy between a client and a server: slow, silent, cut, or led elsewhere, when told."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.delay_s = 0.0
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.port = 0
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hang(self) -> None:
        """Forward nothing; connections stay open."""
        self.flowing.clear()

    def flow(self) -> None:
        self.flowing.set()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        self._server.close()
        self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            pump = asyncio.ensure_future(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                await self.flowing.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
        self._writers.discard(sink)


def check_stream(events: list[Event], result: JobResult) -> None:
    """No gap, no doublet, one end, and the text of the result."""
    offset = 0
    for event in events:
        assert event.offset == offset, (offset, event)
        offset = event.end
    assert [e.final for e in events] == [False] * (len(events) - 1) + [True]
    for number, choice in enumerate(result.choices):
        mine = [e for e in events if e.choice == number]
        assert tuple(t for e in mine for t in e.token_ids) == choice.token_ids
        assert "".join(e.text for e in mine) == choice.text


def repeated(prompt: str, count: int) -> str:
    """What the engine answers."""
    return (prompt * (count // len(prompt) + 1))[:count]


@pytest.fixture(scope="session")
def answer() -> Callable[[str, int], str]:
    return repeated


@pytest.fixture(scope="session")
def byte_model(make_byte_model: Callable[..., Path]) -> Path:
    """A directory with a tokenizer of bytes: id b is byte b."""
    return make_byte_model(end=256)


@pytest.fixture
async def site_at(byte_model: Path) -> AsyncIterator[Callable[..., Site]]:
    """site_at(url): a way in."""
    sites: list[Site] = []

    def make(url: str, **options: Any) -> Site:
        sites.append(Site(url, byte_model, **options))
        return sites[-1]

    yield make
    for site in sites:
        await site.close()


@pytest.fixture
async def proxy_to() -> AsyncIterator[Callable[[int], Any]]:
    """await proxy_to(port): a proxy in front of it."""
    proxies: list[Proxy] = []

    async def make(port: int) -> Proxy:
        proxies.append(await Proxy(port).start())
        return proxies[-1]

    yield make
    for proxy in proxies:
        await proxy.stop()


@pytest.fixture(scope="session")
def cluster_masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedServer]]:
    """Three servers that know each other, with a third of the slots each."""
    with ExitStack() as stack:
        servers = []
        for number in range(3):
            folder = tmp_path_factory.mktemp(f"master{number}")
            servers.append(stack.enter_context(cluster_node(folder)))
        join(servers)
        yield servers


def cluster_node(folder: Path) -> EmbeddedServer:
    folder.mkdir(exist_ok=True)
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
    options += ["--dir", str(folder)]
    options += ["--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"]
    return EmbeddedServer(options=options, port_options=["--cluster-port"])


def join(servers: list[EmbeddedServer], masters: int = 3) -> None:
    """Share the slots among the first `masters`; the others are known and empty."""
    nodes = [redis.Redis(port=server.port) for server in servers]
    bus = [server.ports["--cluster-port"] for server in servers]
    for number, node in enumerate(nodes):
        if number < masters:
            first, last = SLOTS * number // masters, SLOTS * (number + 1) // masters - 1
            node.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
        for other, port in zip(servers, bus):
            if other is not servers[number]:
                node.execute_command("CLUSTER MEET", "127.0.0.1", other.port, port)
    while not all(_joined(node, len(nodes), masters) for node in nodes):
        time.sleep(0.01)
    for node in nodes:
        node.close()


def _joined(node: redis.Redis, known: int, masters: int) -> bool:
    info = node.execute_command("CLUSTER INFO")
    if info["cluster_state"] != "ok" or int(info["cluster_size"]) != masters:
        return False
    return int(info["cluster_known_nodes"]) == known


def cluster_url(servers: list[EmbeddedServer]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


@pytest.fixture(params=["valkey", "redis", "cluster"])
def site(request: pytest.FixtureRequest, site_at: Callable[..., Site]) -> Site:
    """The same test on Valkey, on Debian's redis-server and on three cluster masters."""
    if request.param == "cluster":
        return site_at(cluster_url(request.getfixturevalue("cluster_masters")))
    name = {"valkey": "valkey", "redis": "redis_server"}[request.param]
    return site_at(request.getfixturevalue(name).url)


@dataclass(frozen=True, slots=True)
class Certificates:
    """A CA, and a certificate for 127.0.0.1 that serves both ends."""

    ca: Path
    cert: Path
    key: Path


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed; apt-get install openssl runs the TLS tests")
    folder = tmp_path_factory.mktemp("tls")
    made = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    ca_key, request = folder / "ca.key", folder / "request.pem"
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", made.ca, "-subj", "/CN=ca",
            "-days", 2)  # fmt: skip
    openssl("req", *new_key, "-keyout", made.key, "-out", request, "-subj", "/CN=redis")
    openssl("x509", "-req", "-in", request, "-CA", made.ca, "-CAkey", ca_key, "-CAcreateserial",
            "-out", made.cert, "-days", 2, "-extfile", extensions)  # fmt: skip
    return made


@pytest.fixture(scope="session")
def tls_server(redis_binary: Path, certificates: Certificates) -> Iterator[Any]:
    """Debian's server with TLS; its `--tls-port` asks clients for a certificate too."""
    options = ["--tls-auth-clients", "yes"]
    options += ["--tls-ca-cert-file", str(certificates.ca)]
    options += ["--tls-cert-file", str(certificates.cert)]
    options += ["--tls-key-file", str(certificates.key)]
    with EmbeddedServer(
        binary=redis_binary, options=options, port_options=["--tls-port"]
    ) as server:
        yield server


@pytest.fixture
async def sentinels(redis_binary: Path, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """await sentinels(master): three of them; the URL that leads to whom they name."""
    running: list[asyncio.subprocess.Process] = []

    async def start(master: EmbeddedServer) -> str:
        ports = []
        for number in range(3):
            folder = tmp_path / f"sentinel{number}"
            folder.mkdir()
            ports.append(await _start_sentinel(redis_binary, folder, master, running))
        for port in ports:
            await _knows_its_peers(port)
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "/main"

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _start_sentinel(
    binary: Path,
    folder: Path,
    master: EmbeddedServer,
    running: list[asyncio.subprocess.Process],
) -> int:
    """Its port: another one whenever the one that was free is taken when it starts."""
    while True:
        port = free_port()
        (folder / "sentinel.conf").write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/log\n"
            f"sentinel monitor main 127.0.0.1 {master.port} 2\n"
            "sentinel down-after-milliseconds main 500\n"
            "sentinel failover-timeout main 3000\n"
        )
        command = [str(binary), str(folder / "sentinel.conf"), "--sentinel"]
        process = await asyncio.create_subprocess_exec(*command)
        running.append(process)
        while process.returncode is None:
            if await asyncio.to_thread(answers, port, process.pid):
                return port
            await asyncio.sleep(0.01)
        assert "Failed listening on port" in (folder / "log").read_text()


async def _knows_its_peers(port: int) -> None:
    with redis.Redis(port=port) as sentinel:
        while True:
            with suppress(redis.RedisError):
                if len(sentinel.sentinel_sentinels("main")) == 2:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
def cluster_with_replica(tmp_path: Path) -> Iterator[tuple[str, EmbeddedServer]]:
    """Three masters, and a replica of the last one; the URL, and that master."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(cluster_node(tmp_path / f"node{number}")) for number in range(4)
        ]
        join(servers)
        doomed, heir = servers[2], servers[3]
        with redis.Redis(port=doomed.port) as master, redis.Redis(port=heir.port) as replica:
            name = master.execute_command("CLUSTER MYID").decode()
            replica.execute_command("CLUSTER REPLICATE", name)
            while replica.info("replication").get("master_link_status") != "up":
                time.sleep(0.01)
        yield cluster_url(servers[:2]), doomed
