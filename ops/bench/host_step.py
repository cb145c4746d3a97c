"""What one decode step costs the host: everything but the arithmetic, which here takes no time.

    .venv/bin/python ops/bench/host_step.py [--batches 8 32 128] [--drawn] [--launched] [--profile]

The engine's own core, scheduler, runner, accounts and prefix cache run over a model that computes
nothing; steps are replayed from graphs that do nothing (`--launched`: operation by operation, which
includes torch's own small ones). Copies are plain ones, so what CUDA's launches and pinned buffers
take comes on top. Microseconds of CPU time of this thread, medians over steps.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tokenfleet.engine import EngineConfig, EngineCore, EngineRequest, SamplingParams
from tokenfleet.engine.execution.buckets import decode_buckets, mixed_buckets
from tokenfleet.engine.execution.loading import LoadedModel
from tokenfleet.engine.execution.placed_model import PlacedModel
from tokenfleet.engine.execution.runner import Runner
from tokenfleet.engine.traffic import KVBytes, Traffic

PROMPT, MAX_LEN, BLOCK, VOCAB, HIDDEN = 64, 4096, 16, 32, 16
BUDGET = 2048
WARM, STEPS = 50, 500


class NoModel:
    """A decoder without layers. It says token 0 for ever."""

    spec = SimpleNamespace(vocab_size=VOCAB, hidden_size=HIDDEN, eos_token_ids=(VOCAB - 1,))
    dtype = torch.float32
    device = torch.device("cpu")

    def make_pools(self, _blocks: int, _size: int) -> list[Any]:
        return []

    def forward(self, ids: torch.Tensor, _batch: Any, _pools: Any) -> torch.Tensor:
        return torch.zeros(len(ids), HIDDEN)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB)


def make_core(batch: int, *, launched: bool) -> EngineCore:
    """A core with overlap and `batch` slots."""
    blocks, model = batch * MAX_LEN // BLOCK, NoModel()
    decoder: Any = model
    placed = PlacedModel(
        decoder,
        num_slots=batch,
        num_blocks=blocks,
        block_size=BLOCK,
        max_len=MAX_LEN,
        known_tokens=None,
        device=model.device,
        ahead=True,
        capture=None if launched else lambda _work: lambda: None,
        buckets=[*decode_buckets(batch), *mixed_buckets(BUDGET, batch)],
    )
    vocabulary: Any = model.spec
    runner = Runner(placed)
    traffic = Traffic(weight_bytes=1 << 30, kv=(KVBytes(1 << 10, None),))
    loaded = LoadedModel(vocabulary, runner, MAX_LEN, BLOCK, blocks, traffic, overlap=True)
    config = EngineConfig(".", max_num_seqs=batch, max_num_batched_tokens=BUDGET, device="cpu")
    return EngineCore(config, load=lambda _config, _known: loaded)


def fill(core: EngineCore, batch: int, params: SamplingParams) -> None:
    """Let every slot decode."""
    draw = random.Random(batch)
    for row in range(batch):
        prompt = [draw.randrange(VOCAB - 2) for _ in range(PROMPT)]
        core.add(EngineRequest(str(row), prompt, params))
    for _ in range(WARM):
        core.step()


@contextmanager
def timed(core: EngineCore, spent: dict[str, int]) -> Iterator[None]:
    """Add up the time of a step's parts while this is open."""
    parts = {
        "scheduling": (core.scheduler, "schedule"),
        "inputs, launch": (core.runner, "launch"),
        "collecting": (core.runner, "collect"),
        "settling": (core._accounts, "settle"),
        "figures": (core._reporter, "step"),
    }
    plain: list[tuple[Any, str]] = []
    for part, (owner, name) in parts.items():
        setattr(owner, name, watched(getattr(owner, name), part, spent))
        plain.append((owner, name))
    try:
        yield
    finally:
        for owner, name in plain:
            delattr(owner, name)


def watched(call: Callable[..., Any], part: str, spent: dict[str, int]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return call(*given, **named)
        finally:
            spent[part] += time.thread_time_ns() - began

    return run


def measured(core: EngineCore) -> tuple[float, dict[str, float]]:
    """(microseconds of a step, the same by part); the parts are timed in steps of their own."""
    whole = []
    for _ in range(STEPS):
        began = time.thread_time_ns()
        core.step()
        whole.append(time.thread_time_ns() - began)
    spent: dict[str, int] = defaultdict(int)
    parts = defaultdict(list)
    with timed(core, spent):
        for _ in range(STEPS):
            spent.clear()
            core.step()
            for part, took in spent.items():
                parts[part].append(took)
    return statistics.median(whole) / 1e3, {p: statistics.median(v) / 1e3 for p, v in parts.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--batches", type=int, nargs="+", default=[8, 32, 128])
    arguments.add_argument("--drawn", action="store_true", help="top-k and top-p, not greedy")
    arguments.add_argument("--launched", action="store_true", help="no graphs")
    arguments.add_argument("--profile", action="store_true", help="by function, in place of parts")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    drawn: dict[str, Any] = {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
    params = SamplingParams(
        max_tokens=None, ignore_eos=True, seed=1, **(drawn if asked.drawn else {"temperature": 0.0})
    )
    for batch in asked.batches:
        core = make_core(batch, launched=asked.launched)
        fill(core, batch, params)
        if asked.profile:
            profile = cProfile.Profile(time.thread_time)
            profile.runcall(lambda core=core: [core.step() for _ in range(STEPS)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
            continue
        step, parts = measured(core)
        said = ", ".join(f"{part} {took:.0f}" for part, took in parts.items())
        print(f"batch {batch}: {step:.0f} us a step ({said})")


if __name__ == "__main__":
    main()
