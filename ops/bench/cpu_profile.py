"""Where a step's time goes on a CPU, against the floor that this machine's memory and units set.

    .venv/bin/python ops/bench/cpu_profile.py [--threads 2] [--quantization int8] [--json FILE]

Decode steps at batch 1, 8 and 32 (context 564 and more) and one 564-token prompt, SmolLM2-135M.
The table's total is the untimed step, of which decodes are replayed as programs. Parts are timed
around their calls in a run of its own, operation by operation, as is the step beside them. The
floor of a decode step is its bytes (weights once, KV once) over the measured read rate; that of
the prompt its multiplications over the best measured rate of products.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

for unwanted in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(unwanted, None)

from tokenfleet.engine import Engine, EngineConfig, SamplingParams  # noqa: E402  (sets how threads wait)

import torch  # noqa: E402  isort: skip

from tokenfleet.engine import core as core_module  # noqa: E402
from tokenfleet.engine.accounts import Accounts  # noqa: E402
from tokenfleet.engine.execution import runner as runner_module  # noqa: E402
from tokenfleet.engine.execution.sampler import Sampler  # noqa: E402
from tokenfleet.engine.model import decoder as decoder_module  # noqa: E402
from tokenfleet.engine.model import mlp as mlp_module  # noqa: E402
from tokenfleet.engine.scheduling.scheduler import Scheduler  # noqa: E402
from tokenfleet.kernels.linear import linear, pack_linear  # noqa: E402
from tokenfleet.worker.demo.model import prepare_smollm2  # noqa: E402

PROMPT, OUTPUT = 564, 40
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("products", decoder_module, "linear"),
    ("products in MLP", mlp_module, "linear"),
    ("products in MLP", mlp_module, "gated_mlp"),
    ("attention", decoder_module, "paged_attention"),
    ("rope, KV write", decoder_module, "rope_and_write_kv"),
    ("MLP", mlp_module.DenseMlp, "__call__"),
    ("norms", decoder_module, "add_rms_norm"),
    ("norms", decoder_module, "add_rms_norm_int8"),
    ("norms", decoder_module, "rms_norm"),
    ("sampling", Sampler, "__call__"),
    ("scheduling", Scheduler, "schedule"),
    ("inputs", runner_module, "build_inputs"),
    ("settling", Accounts, "settle"),
)


class Clock:
    """Seconds spent in each part since the last `clear`."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def watching(self) -> Iterator[None]:
        saved = [(owner, name, getattr(owner, name)) for _, owner, name in PARTS]
        for (part, owner, name), (_, _, original) in zip(PARTS, saved, strict=True):
            setattr(owner, name, self._timed(part, original))
        try:
            yield
        finally:
            for owner, name, original in saved:
                setattr(owner, name, original)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self.spent[part] += time.perf_counter() - started
            return result

        return timed


def best(call: Callable[[], object], tries: int = 7) -> float:
    """Shortest of some calls, in seconds."""
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def read_rate() -> float:
    """Bytes a second out of memory that no cache holds."""
    memory = torch.ones(2**28, dtype=torch.int32)
    return memory.nbytes / best(lambda: memory.sum(dtype=torch.int32))


def product_rate(dtype: torch.dtype, quantization: str | None) -> float:
    """Operations a second in the best form of product that is to be had here."""
    tokens, width, out = 512, 1536, 3072
    x = torch.randn(tokens, width, dtype=dtype)
    weight = torch.randn(out, width, dtype=dtype)
    packed = pack_linear(weight.clone(), quantization=quantization)
    times = [best(lambda: linear(x, packed)), best(lambda: torch.nn.functional.linear(x, weight))]
    return 2 * tokens * width * out / min(times)


def decode(engine: Engine, clock: Clock | None, rows: int) -> tuple[float, dict[str, float]]:
    """(median step, seconds a step by part) over the steps in which all rows decode."""
    tokens = random.Random(rows)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    for row in range(rows):
        engine.core.add(core_module.EngineRequest(f"{row}", prompt(tokens), params))
    steps, parts = [], defaultdict(list)
    while engine.core.has_work:
        if clock is not None:
            clock.spent.clear()
        engine.core.step()
        stats = engine.core.stats
        if stats.decode_tokens == stats.scheduled_tokens == rows:
            steps.append(stats.step_s)
            for part, spent in (clock.spent if clock else {}).items():
                parts[part].append(spent)
    return statistics.median(steps), {p: statistics.median(v) for p, v in parts.items()}


def prefill(engine: Engine, clock: Clock | None, seed: int) -> tuple[float, dict[str, float]]:
    """(seconds, by part) of the steps that one prompt takes."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    engine.core.add(core_module.EngineRequest("p", prompt(random.Random(seed)), params))
    if clock is not None:
        clock.spent.clear()
    spent = 0.0
    while engine.core.has_work:
        engine.core.step()
        spent += engine.core.stats.step_s
    return spent, dict(clock.spent) if clock else {}


def prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(300, 49_000) for _ in range(PROMPT)]


def rows_of_table(
    engine: Engine, single: Engine, dtype: torch.dtype, quantization: str | None
) -> list[Any]:
    """One entry a workload: measured, parts, floor. `single` runs operation by operation."""
    clock, reading = Clock(), read_rate()
    products = product_rate(dtype, quantization)
    inner, head = weights_of(engine)
    itemsize = 1 if quantization == "int8" else dtype.itemsize
    weights = (inner + head) * itemsize
    kv = engine.core.runner.model.decoder.kv_bytes_per_block(1)
    found: list[Any] = []
    for name, run in (
        ("decode 1", lambda e, c: decode(e, c, 1)),
        ("decode 8", lambda e, c: decode(e, c, 8)),
        ("decode 32", lambda e, c: decode(e, c, 32)),
        ("prompt 564", lambda e, c: prefill(e, c, random.randrange(10**6))),
    ):
        run(engine, None)  # warm
        plain = [run(engine, None)[0] for _ in range(3)]
        with clock.watching():
            slow, parts = run(single, clock)
        if name.startswith("decode"):
            count = int(name.split()[1])
            floor = (weights + count * kv * (PROMPT + OUTPUT / 2)) / reading
        else:
            floor = PROMPT * 2 * inner / products
        found.append(
            {
                "workload": name,
                "step_ms": statistics.median(plain) * 1e3,
                "lowest_ms": min(plain) * 1e3,
                "one_by_one_ms": slow * 1e3,
                "parts_ms": {part: spent * 1e3 for part, spent in parts.items()},
                "floor_ms": floor * 1e3,
            }
        )
    return [
        {
            "read_gb_s": reading / 1e9,
            "product_gflop_s": products / 1e9,
            "weight_bytes": weights,
            "kv_bytes_per_token": kv,
        },
        found,
    ]


def weights_of(engine: Engine) -> list[int]:
    """Weights of the products that every token goes through, then those of the head."""
    decoder = engine.core.runner.model.decoder
    inner = 0
    for layer in decoder.layers:
        for packed in (
            layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down,
        ):  # fmt: skip
            inner += packed.out_features * packed.in_features
    return [inner, decoder.lm_head.out_features * decoder.lm_head.in_features]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--threads", type=int, default=os.cpu_count())
    arguments.add_argument("--quantization", choices=["int8"])
    arguments.add_argument("--json", type=Path)
    asked = arguments.parse_args()
    torch.set_num_threads(asked.threads)
    engine, single = (
        Engine(
            EngineConfig(
                prepare_smollm2(), max_num_seqs=32, max_num_batched_tokens=1024,
                prefix_cache=False, quantization=asked.quantization, enforce_eager=one_by_one,
            )
        )
        for one_by_one in (False, True)
    )  # fmt: skip
    dtype = engine.core.runner.model.decoder.dtype
    machine, rows = rows_of_table(engine, single, dtype, asked.quantization)
    report = {
        "dtype": str(dtype).removeprefix("torch."), "quantization": asked.quantization,
        "threads": asked.threads, "torch": torch.__version__, "machine": machine, "rows": rows,
    }  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    names = ["products", "gate", *(p for p, _, _ in PARTS if not p.startswith(("pro", "MLP")))]
    names = list(dict.fromkeys(names))
    print(
        f"{report['dtype']} {report['quantization'] or ''}: read {machine['read_gb_s']:.1f} GB/s, "
        f"products {machine['product_gflop_s']:.0f} GFLOP/s"
    )
    print("| | step ms | floor ms | x floor | one by one | " + " | ".join(names) + " | rest |")
    print("|---" * (len(names) + 6) + "|")
    for row in rows:
        parts = {"products": 0.0, **row["parts_ms"]}
        parts["gate"] = parts.pop("MLP", 0.0) - parts.get("products in MLP", 0.0)
        parts["products"] += parts.pop("products in MLP", 0.0)
        cells = [f"{parts.get(name, 0.0):.2f}" for name in names]
        rest = row["one_by_one_ms"] - sum(parts.values())
        print(
            f"| {row['workload']} | {row['step_ms']:.1f} | {row['floor_ms']:.1f} | "
            f"{row['step_ms'] / row['floor_ms']:.2f} | {row['one_by_one_ms']:.1f} | "
            + " | ".join(cells)
            + f" | {rest:.2f} |"
        )


if __name__ == "__main__":
    main()
