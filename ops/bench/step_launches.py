"""What a captured step asks of a GPU, counted without one: launches, bytes, and what they take.

    python ops/bench/step_launches.py            a table for some models and batch sizes

The launches are those of the engine itself over tensors without data: Triton kernels as they are
recorded, and torch's operations that are no views. Bytes are weights, KV and logits; what layers
hand on to each other stays in the cache. The prediction is a floor: bytes over the bandwidth of a
copy, and a fixed time for each launch inside a graph, in which nothing is read.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))  # the scripts of the device check

from device_compile import META, Blank, NoTransfers
from device_engine import SHAPES

from tokenfleet.engine.execution.buckets import Bucket
from tokenfleet.engine.execution.capture import Work
from tokenfleet.engine.execution.graphs import DeviceTables, StepGraphs
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import Loader
from tokenfleet.engine.traffic import traffic_of
from tokenfleet.kernels.gpu.launch import TARGETS, Launch, recording

BYTES_S = 4.3e12
"""What a copy reads and writes on an H200, as it was measured elsewhere."""
FLOPS_S = 7e14
"""Of large products in bf16 there: those of many rows take longer than reading their weights."""
LAUNCH_S = 1.5e-6
"""From the end of a kernel of a graph until the next one's first bytes arrive: an estimate."""
_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
    "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-8B": _LLAMA | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                          "num_hidden_layers": 32, "num_attention_heads": 32,
                          "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
                          "max_position_embeddings": 8192},
    "SmolLM2-135M": _LLAMA | {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
                              "num_hidden_layers": 30, "num_attention_heads": 9,
                              "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0,
                              "tie_word_embeddings": True, "max_position_embeddings": 8192},
    "Qwen3-0.6B": SHAPES["0.6B"],
}  # fmt: skip
BATCHES = (1, 32, 256)
LENGTH, MAX_LEN = 640, 1024
"""Tokens of each sequence, and what graphs are captured for."""


@dataclass(frozen=True, slots=True)
class Step:
    """One captured decode step of LENGTH tokens a sequence; counters by kernel or operation."""

    sequences: int
    forward: Counter[str]
    greedy: Counter[str]
    drawn: Counter[str]
    weight_bytes: int
    kv_bytes: int
    logits_bytes: int
    """Rounded, widened and read once."""

    @property
    def launches(self) -> int:
        """Of a greedy step."""
        return self.forward.total() + self.greedy.total()

    @property
    def reading_s(self) -> float:
        """What the memory, or the products, take."""
        flops = self.weight_bytes * self.sequences  # two for each of two bytes
        products = max(self.weight_bytes / BYTES_S, flops / FLOPS_S)
        return products + (self.kv_bytes + self.logits_bytes) / BYTES_S

    @property
    def seconds(self) -> float:
        """The floor of a greedy step."""
        return self.reading_s + self.launches * LAUNCH_S

    @property
    def drawn_s(self) -> float:
        """What tokens drawn with top-p add, but for reading logits again and again."""
        return (self.drawn.total() - self.greedy.total()) * LAUNCH_S


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations that compute or copy something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        made = isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in given
        if name not in _FREE and (made or func._schema.is_mutable):
            self.found[name] += 1
        return result


_FREE = {"empty", "empty_like", "new_empty"}


class Counted:
    """A capture that counts what each work launches."""

    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches
        self.found: list[Counter[str]] = []

    def __call__(self, work: Work) -> Work:
        before = len(self._launches)
        with Operations() as operations:
            work()
        self.found.append(operations.found + Counter(x.name for x in self._launches[before:]))
        return work


def counted(fields: dict[str, Any], sequences: int, quantization: str | None = None) -> Step:
    """A decode step of so many sequences of LENGTH tokens."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        spec = read_spec(Path(folder), max_model_len=MAX_LEN)
    with recording(TARGETS[90]) as launches, torch.inference_mode():
        source = Blank(torch.bfloat16)
        decoder = Loader(source, spec, torch.bfloat16, META, quantization, None).decoder()
        capture = Counted(launches)
        _captured(decoder, sequences, capture)
    forward, greedy, drawn = capture.found
    traffic = traffic_of(decoder)
    return Step(
        sequences, forward, greedy, drawn, traffic.weight_bytes,
        sequences * sum(kv.read(LENGTH - 1, 1) for kv in traffic.kv),
        sequences * spec.vocab_size * (2 + 2 + 4 + 4),
    )  # fmt: skip


def _captured(decoder: Decoder, sequences: int, capture: Counted) -> None:
    StepGraphs(
        decoder, decoder.make_pools(9, 16), [Bucket(sequences, sequences, decode=True)],
        tables=DeviceTables(sequences, MAX_LEN // 16, NoTransfers(), META),
        newest=torch.zeros(sequences + 1, dtype=torch.int64, device=META), unknown=None,
        max_len=MAX_LEN, transfers=NoTransfers(), capture=capture,
    )  # fmt: skip


def lines() -> Iterator[str]:
    """The table, in markdown."""
    yield (
        "| model | sequences | launches | with top-p | GB | reading, ms | launches, ms | step, ms"
        " | tokens/s | top-p, ms |"
    )
    yield "|" + "---|" * 10
    for name, fields in MODELS.items():
        for sequences in BATCHES:
            step = counted(fields, sequences)
            num_bytes = step.weight_bytes + step.kv_bytes + step.logits_bytes
            figures = (
                f"{num_bytes / 1e9:.2f}", f"{step.reading_s * 1e3:.2f}",
                f"{step.launches * LAUNCH_S * 1e3:.2f}", f"{step.seconds * 1e3:.2f}",
                f"{sequences / step.seconds:,.0f}", f"+{step.drawn_s * 1e3:.2f}",
            )  # fmt: skip
            drawn = step.forward.total() + step.drawn.total()
            row = (name, str(sequences), str(step.launches), str(drawn), *figures)
            yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print("\n".join(lines()))
