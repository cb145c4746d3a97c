"""Does it pay that a worker prefers jobs whose prompt prefix it holds? Counted, not timed.

Four workers with the engine's own scheduler and prefix cache (8 slots, 800 blocks of 16; no model)
claim from one queue. `fifo` takes the oldest job; `prefix` takes, among the 64 oldest, the first
whose prefix this worker has run lately; `sorted` is fifo over jobs submitted sorted by prefix.

    python ops/bench/placement.py
"""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tokenfleet.engine import EngineConfig, EngineCore, EngineRequest, SamplingParams
from tokenfleet.engine.execution.flight import Flight, StepResult
from tokenfleet.engine.execution.loading import LoadedModel

WORKERS, SLOTS, BLOCKS, BLOCK, WINDOW, REMEMBERED = 4, 8, 800, 16, 64, 64
PREFIX, SUFFIX, OUTPUT, JOBS = 1000, 100, 60, 600


class NoModel:
    """Steps without computing: every sampled token is 5."""

    vocab_size = 50_000
    eos_token_ids = (1,)

    def __init__(self) -> None:
        self._queue: deque[StepResult] = deque()

    def launch(self, plan: Any) -> Flight:
        flight = Flight([])
        self._queue.append(StepResult([5 if chunk.samples else -1 for chunk in plan.work]))
        return flight

    def collect(self, _: Flight) -> StepResult:
        return self._queue.popleft()


@dataclass
class Worker:
    core: Any
    live: int = 0
    lately: dict[int, int] = field(default_factory=dict)
    """Prefix -> when it was last run here."""


def make_worker() -> Worker:
    config = EngineConfig(
        model=".", max_num_seqs=SLOTS, max_num_batched_tokens=512, num_blocks=BLOCKS,
        block_size=BLOCK, max_model_len=4096,
    )  # fmt: skip
    model: Any = NoModel()
    loaded = LoadedModel(model, model, 4096, BLOCK, BLOCKS)
    return Worker(EngineCore(config, load=lambda *_: loaded, compiler=None))


def jobs(prefixes: int) -> list[tuple[int, list[int]]]:
    """(prefix, prompt); few prefixes are asked for often, many rarely."""
    noise = random.Random(1)
    heads = [[noise.randrange(2, 50_000) for _ in range(PREFIX)] for _ in range(prefixes)]
    weights = [1 / (number + 1) for number in range(prefixes)]
    chosen = noise.choices(range(prefixes), weights, k=JOBS)
    return [(n, heads[n] + [noise.randrange(2, 50_000) for _ in range(SUFFIX)]) for n in chosen]


def pick(policy: str, worker: Worker, queue: deque[tuple[int, list[int]]]) -> int:
    if policy == "prefix":
        for place in range(min(WINDOW, len(queue))):
            if queue[place][0] in worker.lately:
                return place
    return 0


def play(policy: str, prefixes: int, load: float) -> tuple[float, int]:
    """Hit rate and tokens prefilled. load: jobs waiting and running, per slot of the fleet."""
    todo = deque(sorted(jobs(prefixes)) if policy == "sorted" else jobs(prefixes))
    queue: deque[tuple[int, list[int]]] = deque()
    workers, noise, number = [make_worker() for _ in range(WORKERS)], random.Random(2), 0
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    while todo or queue or any(worker.live for worker in workers):
        while todo and len(queue) + sum(w.live for w in workers) < load * WORKERS * SLOTS:
            queue.append(todo.popleft())
        for worker in noise.sample(workers, WORKERS):
            while queue and worker.live < SLOTS:
                place = pick(policy, worker, queue)
                prefix, prompt = queue[place]
                del queue[place]
                worker.core.add(EngineRequest(str(number), prompt, params))
                worker.live, number = worker.live + 1, number + 1
                worker.lately[prefix] = number
                if len(worker.lately) > REMEMBERED:
                    del worker.lately[min(worker.lately, key=worker.lately.__getitem__)]
        for worker in workers:
            if worker.core.has_work:
                worker.live -= sum(e.finish_reason is not None for e in worker.core.step())
    stats = [worker.core.stats for worker in workers]
    hits, asked = sum(s.cache_hits_total for s in stats), sum(s.cache_queries_total for s in stats)
    return hits / asked, sum(s.prefill_tokens_total for s in stats)


def main() -> None:
    sys.stdout.write("prefixes  jobs per slot  policy  hit rate  tokens prefilled\n")
    for prefixes in (4, 40, 200):
        for load in (0.5, 1.5, 4.0):
            for policy in ("fifo", "prefix", "sorted"):
                rate, prefilled = play(policy, prefixes, load)
                row = f"{prefixes:8d} {load:14.1f}  {policy:6s} {rate:9.1%} {prefilled:17d}\n"
                sys.stdout.write(row)


if __name__ == "__main__":
    main()
