"""vLLM's HTTP server under test: a process of its own, asked for streams over the loopback.

What a peer's user has: every token passes an HTTP server and its client. The client counts tokens
by their ids, as some decode to no text.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tokenfleet.worker.bench.figures import Seen, figures_of
from tokenfleet.worker.bench.line_protocol import Jobs, Runner, serve
from tokenfleet.worker.bench.memory import peak_rss_of_group

MODEL_NAME = "bench"
READY_WITHIN_S = 600.0
POLL_S = 0.5


def open_server(options: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """A server on the checkpoint, prefix caching off, with room for all jobs at once."""
    port = unused_port()
    server = subprocess.Popen(command_of(options, port), stdin=subprocess.DEVNULL)
    client = asyncio.Runner()
    try:
        version = client.run(_ready(server, port))
    except BaseException:
        server.kill()
        raise

    def run(jobs: Jobs, _: dict[str, Any]) -> dict[str, float]:
        figures = client.run(run_streams(port, jobs))
        return figures | {"peak_rss_bytes": float(peak_rss_of_group(os.getpgid(server.pid)))}

    return run, {"vllm": version, "dtype": options["dtype"], "server": True}


def command_of(options: dict[str, Any], port: int) -> Sequence[str]:
    """The server's command line; `vllm serve` itself does not start here."""
    return (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", options["model"], "--served-model-name", MODEL_NAME),
        *("--dtype", options["dtype"], "--max-model-len", "2048"),
        *("--max-num-seqs", str(options["slots"]), "--no-enable-prefix-caching"),
        *("--disable-uvicorn-access-log", "--seed", "0"),
    )


def unused_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def run_streams(port: int, jobs: Jobs) -> dict[str, float]:
    """All jobs at once, a stream each."""
    import aiohttp

    forever = aiohttp.ClientTimeout(total=None)
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", timeout=forever, connector=connections
    ) as session:
        asked_at = time.perf_counter()
        seen = await asyncio.gather(*(_follow(session, *job, asked_at) for job in jobs))
    return figures_of(seen)


async def _follow(session: Any, prompt: list[int], output: int, asked_at: float) -> Seen:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    seen = Seen(asked_at)
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            count = tokens_of(line)
            if count:
                seen.tokens(time.perf_counter(), count)
    return seen


def tokens_of(line: bytes) -> int:
    """How many tokens a line of the stream brings."""
    if not line.startswith(b"data: {"):
        return 0
    said = json.loads(line[len(b"data: ") :])
    if "error" in said:
        raise RuntimeError(f"the server answered {said['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in said["choices"])


async def _ready(server: subprocess.Popen[bytes], port: int) -> str:
    """Wait for the server to answer; returns its version."""
    import aiohttp

    give_up = time.monotonic() + READY_WITHIN_S
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        while time.monotonic() < give_up:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with code {server.returncode}")
            try:
                async with session.get("/version") as response:
                    return str((await response.json())["version"])
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(POLL_S)
    raise RuntimeError(f"the server was not ready within {READY_WITHIN_S:.0f} s")


if __name__ == "__main__":
    serve({"vllm-server": open_server})
