"""What the engine's features cost and save: sampling, structured output, shared prompts.

Costs are ratios of medians of decode steps, with the plain and the other batch taking turns in one
engine. They run in this process: nothing else is compared.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = 32
PROMPT, OUTPUT = 64, 24
ROLLOUTS, ROLLOUT_PROMPT = 16, 500
SHARED, TAILS = 1000, 64
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "required": ["name", "scores"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Decode steps of a batch with a feature beside those of a plain one, in milliseconds."""

    name: str
    plain_ms: list[float]
    with_ms: list[float]

    @property
    def ratio(self) -> float:
        """Of the medians; 1.0 costs nothing."""
        return statistics.median(self.with_ms) / statistics.median(self.plain_ms)


def features(model: Path, *, dtype: str, threads: int, repeats: int) -> dict[str, Any]:
    """Measure all of them; figures by name."""
    import torch

    from tokenfleet.engine import Engine, EngineConfig

    if threads:
        torch.set_num_threads(threads)
    engine = Engine(
        EngineConfig(model, dtype=dtype, max_num_seqs=ROWS, max_model_len=2048, num_blocks=4096)
    )
    costs = [
        cost_of(engine, "all sampling parameters", _everything, repeats),
        cost_of(engine, "temperature and top-p", _top_p, repeats),
        cost_of(engine, "JSON schema", _structured, repeats),
    ]
    return {
        "dtype": str(engine.core.runner.model.decoder.dtype).removeprefix("torch."),  # type: ignore[attr-defined]
        "rows": ROWS,
        "costs": [
            {
                "name": cost.name,
                "plain_ms": statistics.median(cost.plain_ms),
                "with_ms": statistics.median(cost.with_ms),
                "ratio": cost.ratio,
            }
            for cost in costs
        ],
        "rollouts": rollouts(engine),
        "shared_prompt": shared_prompt(engine),
    }


def cost_of(engine: Any, name: str, params: Callable[[int], Any], repeats: int) -> Cost:
    """Plain and other batches in turns; the first turn of each is not counted."""
    plain: list[float] = []
    other: list[float] = []
    for turn in range(repeats + 1):
        for found, make in ((plain, _greedy), (other, params)):
            steps = _decode_steps(engine, make, seed=turn)
            if turn:
                found += steps
    return Cost(name, plain, other)


def rollouts(engine: Any) -> dict[str, int]:
    """Blocks that n samples of one prompt hold when all have begun, and what separate ones
    would."""
    from tokenfleet.engine import SamplingParams

    prompt = _prompt(engine, ROLLOUT_PROMPT, seed=99)
    params = SamplingParams(max_tokens=3, n=ROLLOUTS, seed=1, ignore_eos=True)
    engine.add("rollouts", prompt, params)
    found: dict[str, int] = {}
    while engine.has_work:
        engine.step()
        if engine.stats.running == ROLLOUTS and not found:
            used, needed = engine.stats.blocks_used, engine.stats.blocks_needed
            found = {"samples": ROLLOUTS, "blocks_used": used, "blocks_separate": needed}
    return found


def shared_prompt(engine: Any) -> dict[str, int]:
    """Prompt tokens given and computed when many prompts begin alike."""
    from tokenfleet.engine import SamplingParams

    system = _prompt(engine, SHARED, seed=7)
    prompts = [system + _prompt(engine, 8, seed=1000 + i) for i in range(TAILS)]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    before = engine.stats.prefill_tokens_total
    engine.generate(prompts[:1], params)
    engine.generate(prompts[1:], params)
    computed = engine.stats.prefill_tokens_total - before
    return {"prompts": TAILS, "tokens": sum(map(len, prompts)), "computed": computed}


def _decode_steps(engine: Any, make: Callable[[int], Any], seed: int) -> list[float]:
    """Milliseconds of the steps in which every row got its next token and nothing else ran."""
    for row in range(ROWS):
        engine.add(f"{seed}-{row}", _prompt(engine, PROMPT, seed * ROWS + row), make(row))
    found = []
    while engine.has_work:
        engine.step()
        stats = engine.stats
        if stats.decode_tokens == stats.scheduled_tokens == ROWS:
            found.append(stats.step_s * 1e3)
    return found


def _prompt(engine: Any, length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, engine.core.spec.vocab_size) for _ in range(length)]


def _greedy(_row: int) -> Any:
    from tokenfleet.engine import SamplingParams

    return SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)


def _everything(row: int) -> Any:
    from tokenfleet.engine import SamplingParams

    return SamplingParams(
        max_tokens=OUTPUT, ignore_eos=True, seed=row, temperature=0.8, top_k=50, top_p=0.9,
        min_p=0.02, presence_penalty=0.2, frequency_penalty=0.1, repetition_penalty=1.1,
        logit_bias={100: 1.0, 200: -1.0}, min_tokens=OUTPUT, logprobs=5, stop=["never this"],
    )  # fmt: skip


def _top_p(row: int) -> Any:
    from tokenfleet.engine import SamplingParams

    return SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=row, temperature=0.8, top_p=0.9)


def _structured(row: int) -> Any:
    from tokenfleet.engine import SamplingParams

    # long enough in every row: the schema's array goes on as long as the model likes
    return SamplingParams(
        max_tokens=OUTPUT, temperature=1.0, seed=row, structured_outputs={"json": SCHEMA}
    )
