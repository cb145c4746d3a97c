"""What the HTTP gateway adds: the same short jobs through it and past it, in turns, in one run.

The worker's engine is simulated, so that a token costs the same whoever asks; what differs is the
way there. Server, worker, gateway and both readers share this machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tokenfleet.worker.bench.figures import Seen, percentile
from tokenfleet.worker.bench.runs import BenchFailed, Say
from tokenfleet.worker.demo.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tokenfleet.producer import AsyncClient

MODEL_NAME = "bench"
PROMPT = "Say it again, and again. "
HOST = "127.0.0.1"

Ask = Callable[[], Coroutine[Any, Any, Seen]]


@dataclass(frozen=True, slots=True)
class GatewayBench:
    """What is measured.

    model: for its tokenizer only.
    """

    model: Path
    requests: int = 40
    """One after the other, each way, in each round."""
    streams: int = 16
    """At once, each way, in each round."""
    tokens: int = 32
    step_ms: float = 5.0
    repeats: int = 3


def bench_gateway(config: GatewayBench, say: Say) -> dict[str, Any]:
    """Run it; the figures."""
    return asyncio.run(_bench(config, say))


async def _bench(config: GatewayBench, say: Say) -> dict[str, Any]:
    from tokenfleet.producer import AsyncClient
    from tokenfleet.producer.embedded import EmbeddedServer

    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as logs, EmbeddedServer() as server:
        async with (
            _worker(config, server.url, Path(logs)),
            _gateway(server.url) as port,
            AsyncClient(server.url) as client,
        ):
            ways: dict[str, Ask] = {
                "direct": lambda: _direct(client, config.tokens),
                "gateway": lambda: _through(port, config.tokens),
            }
            for ask in ways.values():
                await ask()
            return _figures(config, await _rounds(config, ways, say))


async def _rounds(
    config: GatewayBench, ways: Mapping[str, Ask], say: Say
) -> dict[str, list[tuple[list[float], float]]]:
    """Per way and round: every TTFT of the lone requests, and tokens/s of the many."""
    found: dict[str, list[tuple[list[float], float]]] = {name: [] for name in ways}
    for number in range(config.repeats):
        first: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(config.requests):
            for name, ask in ways.items():  # in turns: the machine drifts within seconds
                seen = await ask()
                first[name].append(seen.arrivals[0][0] - seen.asked_at)
        for name, ask in ways.items():
            began = time.perf_counter()
            await asyncio.gather(*(ask() for _ in range(config.streams)))
            pace = config.streams * config.tokens / (time.perf_counter() - began)
            found[name].append((first[name], pace))
            say(f"round {number + 1}, {name}: TTFT p50 {percentile(first[name], 50) * 1e3:.1f} ms")
    return found


def _figures(
    config: GatewayBench, found: Mapping[str, list[tuple[list[float], float]]]
) -> dict[str, Any]:
    ways = {}
    for name, rounds in found.items():
        ways[name] = {
            "ttft_p50_ms": median(percentile(first, 50) for first, _ in rounds) * 1e3,
            "ttft_p99_ms": median(percentile(first, 99) for first, _ in rounds) * 1e3,
            "tokens_per_s": median(pace for _, pace in rounds),
        }
    direct, gateway = ways["direct"], ways["gateway"]
    return {
        "bench": "gateway",
        "requests": config.requests,
        "streams": config.streams,
        "tokens": config.tokens,
        "step_ms": config.step_ms,
        "repeats": config.repeats,
        "ways": ways,
        "added_ttft_p50_ms": gateway["ttft_p50_ms"] - direct["ttft_p50_ms"],
        "ttft_p50_ratio": gateway["ttft_p50_ms"] / direct["ttft_p50_ms"],
        "tokens_per_s_ratio": gateway["tokens_per_s"] / direct["tokens_per_s"],
    }


async def _direct(client: AsyncClient, tokens: int) -> Seen:
    from tokenfleet.producer import SamplingParams

    seen = Seen(time.perf_counter())
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    job = await client.submit(
        model=MODEL_NAME, prompt=PROMPT, sampling=sampling, priority="interactive"
    )
    async for event in job.stream():
        seen.tokens(time.perf_counter(), len(event.token_ids))
    return seen


async def _through(port: int, tokens: int) -> Seen:
    """The same over HTTP, on a connection that is open already, as clients keep them."""
    asked = {
        "model": MODEL_NAME,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(HOST, port)
    seen = Seen(time.perf_counter())
    writer.write(head.encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            if b'"error"' in line:
                raise BenchFailed(f"the gateway says: {line.decode()}")
            seen.tokens(time.perf_counter(), 1)
    writer.close()
    await writer.wait_closed()
    if seen.count == 0:
        raise BenchFailed("the gateway answered without a token")
    return seen


@asynccontextmanager
async def _worker(config: GatewayBench, url: str, logs: Path) -> AsyncIterator[None]:
    settings = {
        "redis_url": url,
        "model": config.model,
        "model_name": MODEL_NAME,
        "max_num_seqs": config.streams,
        "flush_interval_ms": 0,  # an event a token: the most that a gateway has to carry
        "simulated_step_ms": config.step_ms,
        "grace_s": 0,
        "log_level": "warning",
    }
    worker = WorkerProcess("bench-1", settings, logs / "worker.log")
    try:
        await worker.start()
        await worker.ready()
        yield
    finally:
        await worker.stop(3.0)


@asynccontextmanager
async def _gateway(url: str) -> AsyncIterator[int]:
    """A gateway in a process of its own; its port."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenfleet.producer.gateway"),
        *("--redis-url", url, "--host", HOST, "--port", "0", "--no-status-page"),
        stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("TOKENFLEET_")},
    )
    assert process.stderr is not None
    drain: asyncio.Task[bytes] | None = None
    try:
        said = (await process.stderr.readline()).decode()
        if '"gateway_listens"' not in said:
            raise BenchFailed(f"the gateway did not start: {said.strip()}")
        drain = asyncio.create_task(process.stderr.read())
        yield int(json.loads(said)["port"])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if drain is not None:
            await drain
