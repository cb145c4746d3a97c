"""Servers that belong together: the nodes of a cluster, and sentinels with their master."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import redis

from tokenfleet.producer.embedded import EmbeddedServer, answers, free_port

SLOTS = 16384
CALM_MS = 300_000
"""So long sentinels wait for a master's answer until they are told that one is about to fail."""
ALERT_MS = 500


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


async def start_sentinel(
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
            f"sentinel down-after-milliseconds main {CALM_MS}\n"
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


def be_alert(url: str) -> None:
    """Let the sentinels of a URL take a silent master for down soon."""
    for host in url.removeprefix("redis+sentinel://").partition("/")[0].split(","):
        with redis.Redis(port=int(host.rpartition(":")[2])) as sentinel:
            sentinel.execute_command("SENTINEL SET", "main", "down-after-milliseconds", ALERT_MS)


async def knows_its_peers(port: int) -> None:
    """Wait until the sentinel has found the two others."""
    with redis.Redis(port=port) as sentinel:
        while True:
            with suppress(redis.RedisError):
                if len(sentinel.sentinel_sentinels("main")) == 2:
                    return
            await asyncio.sleep(0.05)
