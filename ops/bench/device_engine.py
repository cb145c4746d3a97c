"""The engine on random weights: graphs and overlap change nothing, memory comes back, and how fast.

Weights are made on the device in the shapes of a config; no checkpoint is read. Workload W is 564
tokens in, 128 out, all jobs at once.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device_common import Findings, copy_ceiling, synchronise

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.core import EngineCore
from tokenfleet.engine.execution.loading import place_model
from tokenfleet.engine.execution.placement import pick_dtype
from tokenfleet.engine.model import one_row
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import Loader
from tokenfleet.engine.model.tensor_source import RandomTensors
from tokenfleet.engine.request import EngineRequest
from tokenfleet.engine.sampling_params import SamplingParams

_QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936,
    "head_dim": 128, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "attention_bias": False,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 151645,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                      "num_attention_heads": 16, "tie_word_embeddings": True},
    "8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                    "num_attention_heads": 32},
    "32B": _QWEN3 | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                     "num_attention_heads": 64},
    "tiny": _QWEN3 | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                      "vocab_size": 320, "eos_token_id": 319, "max_position_embeddings": 1024},
    "small": _QWEN3 | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
                       "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
                       "vocab_size": 8000, "eos_token_id": 7999, "max_position_embeddings": 1024},
}  # fmt: skip
MODES = {
    "graphs+overlap": {"enforce_eager": False, "overlap": True},
    "graphs": {"enforce_eager": False, "overlap": False},
    "eager": {"enforce_eager": True, "overlap": False},
    "general way": {"enforce_eager": False, "overlap": True},
    "early": {"enforce_eager": False, "overlap": True},
}


@dataclass(frozen=True, slots=True)
class Workload:
    """So many jobs of the same size at once."""

    prompt: int = 564
    output: int = 128
    drawn: bool = False
    """Whether tokens are drawn, of the best of 0.9 of the mass, or the best ones."""

    def requests(self, count: int, vocab_size: int) -> Iterator[EngineRequest]:
        how = {"temperature": 0.8, "top_p": 0.9, "seed": 1} if self.drawn else {"temperature": 0.0}
        params = SamplingParams(max_tokens=self.output, ignore_eos=True, **how)
        for i in range(count):
            prompt = [(7919 * (i + 1) + 31 * j) % (vocab_size - 2) for j in range(self.prompt)]
            yield EngineRequest(f"{i}", prompt, params)


class Bench:
    """One set of random weights, and engines over them."""

    def __init__(self, shape: str, folder: Path, device: torch.device, **settings: Any) -> None:
        self.path = folder / shape
        self.path.mkdir(exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(SHAPES[shape]))
        self.device = device
        self.config = EngineConfig(self.path, device=device.type, **settings)
        spec = read_spec(self.path, max_model_len=self.config.max_model_len)
        dtype = pick_dtype(self.config, spec, device)
        source = RandomTensors(device, tied=spec.tie_embeddings)
        quantization = self.config.quantization
        with torch.no_grad():
            self.decoder: Decoder = Loader(
                source, spec, dtype, device, quantization, False
            ).decoder()

    def core(self, **changes: Any) -> EngineCore:
        """An engine over these weights; others are given up first."""
        _give_back(self.device)
        config = replace(self.config, **changes)
        return EngineCore(config, load=lambda _c, known: place_model(config, self.decoder, known))


def _give_back(device: torch.device) -> None:
    """To the card, what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def play(core: EngineCore, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Everything that comes out, by request."""
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for event in core.step():
            found[event.id] += event.token_ids
    return found


# -- parts ---------------------------------------------------------------------------------


def equality(findings: Findings, folder: Path, device: torch.device, tiny: bool) -> None:
    """Graphs and overlap give the tokens of eager steps, in fp32, around each bucket; no leak."""
    counts = (1, 5) if tiny else (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33)
    bench = Bench(
        "tiny" if tiny else "small", folder, device, dtype="float32", max_num_seqs=counts[-1],
        max_num_batched_tokens=64, max_model_len=128, num_blocks=600, prefix_cache=False, seed=1,
    )  # fmt: skip
    expected = {}
    eager = bench.core(**MODES["eager"])
    for count in counts:
        expected[count] = play(eager, _mixed(count))
    del eager
    core = None
    for mode in ("graphs", "graphs+overlap"):
        del core  # before the next one takes memory
        core = bench.core(**MODES[mode])
        for count in counts:
            found = play(core, _mixed(count))
            core.audit()
            differing = [key for key, ids in expected[count].items() if found[key] != ids]
            findings.put("equality", mode=mode, batch=count, differing=differing, ok=not differing)
        held = []
        for _ in range(3):
            play(core, _mixed(counts[-1]))
            synchronise(device)
            held.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
        clean = held[1] == held[2] and core.scheduler.pool.num_used == 0
        findings.put("leak", mode=mode, allocated_bytes=held, ok=clean)
    del bench  # the weights have one owner now
    _sleep(core, findings, device, expected[counts[-1]], counts[-1])


def _mixed(count: int) -> list[EngineRequest]:
    """Greedy, drawn and penalised jobs of several lengths."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ]
    requests = []
    for i in range(count):
        params = SamplingParams(max_tokens=16, seed=i, ignore_eos=True, **kinds[i % 3])
        prompt = [(13 * i + 7 * j) % 300 for j in range(3 + 5 * (i % 9))]
        requests.append(EngineRequest(str(i), prompt, params))
    return requests


def _sleep(
    core: EngineCore, findings: Findings, device: torch.device, expected: Any, count: int
) -> None:
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    core.sleep()
    asleep = torch.cuda.memory_allocated(device) if on_gpu else 0
    core.wake()
    equal = play(core, _mixed(count)) == expected
    findings.put("sleep", bytes_before=before, bytes_asleep=asleep, ok=equal)


def engine(findings: Findings, folder: Path, device: torch.device, tiny: bool, shape: str) -> None:
    """W at each concurrency, mode and kind of weights, the most telling first."""
    copy = copy_ceiling(device, (2 << 30) if device.type == "cuda" else (8 << 20))
    work = Workload(20, 6) if tiny else Workload()
    counts = (1, 2) if tiny else (1, 32, 8, 128, 4)
    settings: dict[str, Any] = {
        "max_num_seqs": max(counts), "max_num_batched_tokens": 64 if tiny else 2048,
        "max_model_len": 64 if tiny else 1024, "dtype": "float32" if tiny else "auto",
        "prefix_cache": False, "num_blocks": 64 if tiny else None,
    }  # fmt: skip
    early = shape.endswith("-early")
    shape = shape.removesuffix("-early")
    for weights in ("bf16",) if early else ("bf16", "fp8"):
        if not findings.time_for(8):
            findings.put("stopped", before=f"{shape} {weights}")
            return
        name = "tiny" if tiny else shape
        quantized = {"quantization": "fp8" if weights == "fp8" else None}
        bench = Bench(name, folder, device, **settings, **quantized)
        if early:
            _runs(findings, bench, shape, weights, "early", (1,), work, copy)
            return
        if weights == "bf16" and shape == "8B":
            _prefill(findings, bench, device, tiny)
        _runs(findings, bench, shape, weights, "graphs+overlap", counts, work, copy)
        if weights == "bf16":
            for mode in ("graphs", "eager"):
                _runs(findings, bench, shape, weights, mode, (1, *counts[1:2]), work, copy)
            one_row.Switch.on = False  # layers of one token go the way of all others
            _runs(findings, bench, shape, weights, "general way", (1,), work, copy)
            one_row.Switch.on = True
        del bench
        _give_back(device)  # two sets of weights may be more than the card has


def _runs(
    findings: Findings, bench: Bench, shape: str, weights: str, mode: str,
    counts: tuple[int, ...], work: Workload, copy: float,
) -> None:  # fmt: skip
    started = time.perf_counter()
    core = bench.core(**MODES[mode])
    ready = time.perf_counter() - started
    findings.put("started", model=shape, weights=weights, mode=mode, seconds=ready)
    vocab = bench.decoder.spec.vocab_size
    play(core, list(Workload(work.prompt, 4).requests(1, vocab)))  # compiles what is left
    for count in counts:
        if not findings.time_for(4):
            findings.put("stopped", before=f"{shape} {weights} {mode} {count}")
            return
        figures = _timed(core, list(work.requests(count, vocab)), bench.device)
        read = figures.pop("read_bytes_s")
        figures["share_of_copy"] = read / copy if count == 1 else None
        head = {"model": shape, "weights": weights, "mode": mode, "concurrency": count}
        findings.put("W", **head, **figures)
        if mode in ("graphs+overlap", "early") and count == 1:
            drawn = list(replace(work, drawn=True).requests(1, vocab))
            figures = _timed(core, drawn, bench.device)
            figures.pop("read_bytes_s")
            findings.put("W", **head | {"mode": f"{mode}, top-p"}, **figures)


def _timed(core: EngineCore, requests: list[EngineRequest], device: torch.device) -> dict[str, Any]:
    """Tokens a second of the whole, and what a step of decodes alone takes and reads."""
    synchronise(device)
    started = time.perf_counter()
    for request in requests:
        core.add(request)
    tokens, first, step_s, read = 0, None, [], []
    while core.has_work:
        before, bytes_before = time.perf_counter(), core.stats.read_bytes_total
        events = core.step()
        tokens += sum(len(event.token_ids) for event in events)
        if first is None and events:
            first = time.perf_counter() - started
        if core.stats.decode_tokens == len(requests) == core.stats.scheduled_tokens:
            step_s.append(time.perf_counter() - before)
            read.append(core.stats.read_bytes_total - bytes_before)
    took = time.perf_counter() - started
    kept = slice(min(3, len(step_s) // 2), None)  # the first ones still wait for the prompt
    mean = sum(step_s[kept]) / max(1, len(step_s[kept]))
    return {
        "output_tokens_s": tokens / took,
        "first_token_s": first,
        "step_ms": mean * 1000,
        "read_bytes_s": sum(read[kept]) / max(1e-9, sum(step_s[kept])),
    }


def _prefill(findings: Findings, bench: Bench, device: torch.device, tiny: bool) -> None:
    """One long prompt in one step: TFLOP/s of its products."""
    length = 48 if tiny else 8192
    spec = bench.decoder.spec
    core = bench.core(
        max_num_batched_tokens=length, max_num_seqs=1, num_blocks=None if not tiny else 64,
        max_model_len=None if not tiny else 64, enforce_eager=True, overlap=False,
    )  # fmt: skip
    if core.max_len < length + 1:
        findings.put("prefill", ok=False, why=f"max_len {core.max_len}")
        return
    requests = list(Workload(length, 1).requests(1, spec.vocab_size))
    play(core, requests)
    started = time.perf_counter()
    play(core, requests)
    took = time.perf_counter() - started
    width = (spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim
    weights = spec.hidden_size * (width + spec.num_q_heads * spec.head_dim)
    weights += 3 * spec.hidden_size * spec.layers[0].intermediate_size
    attention = 2 * length * spec.num_q_heads * spec.head_dim  # half of it: causal
    flops = length * spec.num_layers * (2 * weights + attention)
    findings.put("prefill", tokens=length, seconds=took, tflop_s=flops / took / 1e12)


def transformers_generate(
    findings: Findings, folder: Path, device: torch.device, tiny: bool
) -> None:
    """transformers' `generate` on W, for comparison."""
    import transformers

    work = Workload(20, 6) if tiny else Workload()
    for shape in ("0.6B", "8B"):
        fields = SHAPES["tiny" if tiny else shape]
        config = transformers.AutoConfig.for_model(**fields)
        with torch.device(device):
            model: Any = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32 if tiny else torch.bfloat16
            ).eval()
        for count in (1, 2) if tiny else (1, 8, 32):
            if not findings.time_for(8):
                findings.put("stopped", before=f"transformers {shape} {count}")
                return
            requests = work.requests(count, config.vocab_size)
            ids = torch.tensor([list(r.prompt_token_ids) for r in requests], device=device)
            asked = {"max_new_tokens": work.output, "min_new_tokens": work.output,
                     "do_sample": False, "pad_token_id": 0}  # fmt: skip
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
            synchronise(device)
            started = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
            synchronise(device)
            took = time.perf_counter() - started
            head = {"model": shape, "weights": "bf16", "mode": "transformers"}
            rate = count * work.output / took
            findings.put("W", **head, concurrency=count, output_tokens_s=rate)
        del model
        _give_back(device)


def main(part: str, lines: str, *more: str) -> None:
    """Run one part."""
    tiny = "--dry-run" in more
    device = torch.device("cpu" if tiny or not torch.cuda.is_available() else "cuda")
    findings = Findings(Path(lines))
    with tempfile.TemporaryDirectory() as folder:
        if part == "equality":
            equality(findings, Path(folder), device, tiny)
        elif part == "transformers":
            transformers_generate(findings, Path(folder), device, tiny)
        else:
            engine(findings, Path(folder), device, tiny, part.removeprefix("engine-"))


if __name__ == "__main__":
    main(*sys.argv[1:])
