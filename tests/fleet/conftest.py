"""Whole workers as processes, a real server, the real client.

`fleet` runs workers whose engine repeats the prompt at a fixed pace: they start in a second, and
their output is known without asking anyone. `model_fleet` runs a tiny random Llama.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer import AsyncClient, AsyncJob, Event, JobResult, SamplingParams
from tokenfleet.producer.embedded import EmbeddedServer
from tokenfleet.producer.keys import GROUP
from tokenfleet.worker.demo.worker_process import WorkerProcess

MODEL = "m"
LONG = os.environ.get("TOKENFLEET_CHAOS") == "long"


@dataclass(slots=True)
class Followed:
    """A job and all that a subscriber saw of it."""

    job: AsyncJob
    events: list[Event] = field(default_factory=list)

    async def follow(self) -> None:
        async for event in self.job.stream():
            self.events.append(event)

    @property
    def text(self) -> str:
        """Of choice 0."""
        return self.text_of(0)

    def text_of(self, choice: int) -> str:
        return "".join(event.text for event in self.events if event.choice == choice)

    @property
    def resumed(self) -> int:
        """Attempts that went on behind tokens of earlier ones."""
        attempts = {e.attempt for e in self.events if e.token_ids}
        return max(0, len(attempts) - 1)

    def check(self, result: JobResult) -> None:
        """The stream has no gap and no doublet, ends once, and equals the result."""
        offset = 0
        for event in self.events:
            assert event.offset == offset, (self.job.id, offset, event)
            offset = event.end
        assert [e.final for e in self.events] == [False] * (len(self.events) - 1) + [True]
        for number, choice in enumerate(result.choices):
            tokens = tuple(t for e in self.events if e.choice == number for t in e.token_ids)
            assert tokens == choice.token_ids
            assert self.text_of(number) == choice.text


class Fleet:
    """Workers on one server. Whatever a test forgets is ended with it."""

    def __init__(self, server: EmbeddedServer, model: Path, logs: Path, **settings: Any) -> None:
        self.server = server
        self.client = AsyncClient(server.url, connect_timeout_s=240.0)
        self.random = random.Random(20261130)
        self._model = model
        self._logs = logs
        self._settings = settings
        self._workers: list[WorkerProcess] = []

    async def start(self, **settings: Any) -> WorkerProcess:
        """A worker that takes jobs."""
        worker = self.spawn(**settings)
        await worker.start()
        await worker.ready()
        return worker

    def spawn(self, **settings: Any) -> WorkerProcess:
        """A worker that has not been started."""
        name = f"w{len(self._workers)}"
        values = {
            "redis_url": self.server.url,
            "model": self._model,
            "model_name": MODEL,
            "max_num_seqs": 8,
            "lease_s": 1.0,
            "max_failures": 100,  # a busy machine lets leases run out that nobody meant to
            "flush_interval_ms": 5,
            **self._settings,
            **settings,
        }
        worker = WorkerProcess(
            name,
            values,
            self._logs / f"{name}.log",
            environment={"OMP_NUM_THREADS": "1", "TOKENFLEET_MODEL": None},
        )
        self._workers.append(worker)
        return worker

    async def submit(self, prompt: str, max_tokens: int, **fields: Any) -> AsyncJob:
        given = {"temperature": 0.0, "ignore_eos": True, **fields.pop("sampling", {})}
        sampling = SamplingParams(max_tokens=max_tokens, **given)
        return await self.client.submit(model=MODEL, prompt=prompt, sampling=sampling, **fields)

    async def follow(self, *jobs: AsyncJob) -> list[Followed]:
        """Follow jobs to their ends and check each stream against its result."""
        followed = [Followed(job) for job in jobs]
        await asyncio.gather(*(one.follow() for one in followed))
        for one in followed:
            one.check(await one.job.result(timeout_s=240))
        return followed

    def log(self, worker: WorkerProcess) -> list[dict[str, Any]]:
        """The worker's log lines."""
        lines = worker.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def said(self, worker: WorkerProcess, event: str, **fields: Any) -> dict[str, Any]:
        """Wait for a log line."""
        while True:
            for line in self.log(worker):
                if line.get("event") == event and fields.items() <= line.items():
                    return line
            await asyncio.sleep(0.02)

    async def pending(self, worker: WorkerProcess | None = None) -> int:
        """Jobs held in the group, by one worker or by all."""
        redis = self.client.link.connection.client
        await redis.connection_pool.disconnect()  # what a restart of the server left behind
        held = 0
        async for key in redis.scan_iter("{tokenfleet:0}:q:*"):
            info = await redis.xpending(key, "workers")
            for consumer in info["consumers"]:
                if worker is None or consumer["name"].decode() == worker.name:
                    held += consumer["pending"]
        return held

    async def held(self, worker: WorkerProcess) -> int:
        """Jobs of the default class that the group counts as the worker's, up to 100 a queue."""
        connection = self.client.link.connection
        names, redis = connection.keys(0), connection.client
        held = [
            await redis.xpending_range(key, GROUP, "-", "+", 100, consumername=worker.name)
            for key in (names.queue(MODEL, "default"), names.front(MODEL, "default"))
        ]
        return sum(map(len, held))

    async def server_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.client.link.connection.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def close(self) -> None:
        await self.client.aclose()
        await asyncio.gather(*(worker.stop(0.0) for worker in self._workers))


def engine_pid(worker: WorkerProcess) -> int:
    """The engine process of a worker."""
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    for child in map(int, children):
        if b"engine_child" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise LookupError(f"worker {worker.pid} has no engine process")


async def engine_of(worker: WorkerProcess) -> int:
    """The engine process of a worker; that of the next one, where it is just being replaced."""
    while True:
        with contextlib.suppress(LookupError, FileNotFoundError):
            return engine_pid(worker)
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def maps(pid: int) -> str:
    """The files that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


def repeated(prompt: str, max_tokens: int) -> str:
    """What the simulated engine answers: its tokens are bytes."""
    return (prompt * (max_tokens // len(prompt) + 1))[:max_tokens]


@pytest.fixture(scope="session")
def tools() -> Any:
    """The helpers above, as attributes."""
    from types import SimpleNamespace

    return SimpleNamespace(
        engine_pid=engine_pid,
        engine_of=engine_of,
        alive=alive,
        maps=maps,
        repeated=repeated,
        long=LONG,
    )


@pytest.fixture(scope="session")
def byte_tokenizer_path(make_byte_model: Callable[..., Path]) -> Path:
    """A directory with a tokenizer of bytes: id b is byte b."""
    return make_byte_model(("<s>", "</s>", "<pad>"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer_path: Path) -> Path:
    """Two layers of random weights; ids are bytes. Written without torch, which takes seconds."""
    import shutil

    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path_factory.mktemp("llama")
    hidden, inner, heads, kv_heads, size, vocab, layers = 96, 128, 6, 3, 16, 259, 2
    shapes = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (kv_heads * size, hidden),
        "self_attn.v_proj": (kv_heads * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    noise = np.random.default_rng(7)

    def random_weight(*shape: int) -> Any:
        return (noise.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": noise.standard_normal((vocab, hidden)).astype(np.float32),
        "lm_head.weight": random_weight(vocab, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(layers):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = random_weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size,
        "vocab_size": vocab, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    shutil.copy(byte_tokenizer_path / "tokenizer.json", path)
    return path


@pytest.fixture
def fleet_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(data_dir=tmp_path / "aof", options=["--appendfsync", "always"]) as server:
        yield server


@pytest.fixture
async def fleet(
    fleet_server: EmbeddedServer, byte_tokenizer_path: Path, tmp_path: Path
) -> AsyncIterator[Fleet]:
    """Simulated engines, 5 ms a step."""
    fleet = Fleet(fleet_server, byte_tokenizer_path, tmp_path, simulated_step_ms=5)
    yield fleet
    await fleet.close()


@pytest.fixture
async def model_fleet(
    fleet_server: EmbeddedServer, tiny_llama: Path, tmp_path: Path
) -> AsyncIterator[Fleet]:
    """Real engines with a tiny model."""
    fleet = Fleet(
        fleet_server,
        tiny_llama,
        tmp_path,
        dtype="float32",
        max_model_len=1024,
        num_blocks=512,
        enforce_eager=True,
    )
    yield fleet
    await fleet.close()
