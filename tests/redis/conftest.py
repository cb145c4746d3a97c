"""Every way that leads to a Redis.

A `Site` is one way in: what clients and workers are given as redis_url.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from tokenfleet.producer.embedded import EmbeddedServer

from .certificates import Certificates, make_certificates
from .proxy import Proxy
from .servers import cluster_node, cluster_url, join, knows_its_peers, start_sentinel
from .sites import Site, repeated


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


@pytest.fixture(params=["valkey", "redis", "cluster"])
def site(request: pytest.FixtureRequest, site_at: Callable[..., Site]) -> Site:
    """The same test on Valkey, on Debian's redis-server and on three cluster masters."""
    if request.param == "cluster":
        return site_at(cluster_url(request.getfixturevalue("cluster_masters")))
    name = {"valkey": "valkey", "redis": "redis_server"}[request.param]
    return site_at(request.getfixturevalue(name).url)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed; apt-get install openssl runs the TLS tests")
    return make_certificates(tmp_path_factory.mktemp("tls"))


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
            ports.append(await start_sentinel(redis_binary, folder, master, running))
        for port in ports:
            await knows_its_peers(port)
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "/main"

    yield start
    for process in running:
        if process.returncode is None:
            process.kill()
            await process.wait()


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
