"""How fast the engine is on random weights, and transformers beside it.

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
from device_common import Findings, copy_ceiling, made_ready, synchronise

from tokenfleet.engine.config import EngineConfig
from tokenfleet.engine.core import EngineCore
from tokenfleet.engine.execution.loading import place_model
from tokenfleet.engine.execution.placement import pick_dtype
from tokenfleet.engine.model import one_row
from tokenfleet.engine.model.decoder import Decoder
from tokenfleet.engine.model.families import read_spec
from tokenfleet.engine.model.loader import Loader
from tokenfleet.engine.model.tensor_source import RandomTensors
from tokenfleet.engine.request import CoreEvent, EngineRequest
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
                source, spec, dtype, device, quantization, None
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
    """Everything that comes out, by request.

    Raises:
        JobFailed: one of them ended in an error, which the engine survives.
    """
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for event in sound(core.step()):
            found[event.id] += event.token_ids
    return found


class JobFailed(RuntimeError):
    """The engine could not compute a job and went on: here that is a fault."""


def sound(events: list[CoreEvent]) -> list[CoreEvent]:
    """The same events.

    Raises:
        JobFailed: one of them tells of an error.
    """
    for event in events:
        if event.error is not None:
            raise JobFailed(f"job {event.id}: {event.error}")
    return events


# -- parts ---------------------------------------------------------------------------------


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
        modes = _modes(early=early, wide=weights == "bf16", counts=counts)
        if weights == "bf16" and shape == "8B" and not early:
            with findings.attempt("prefill", model=shape):
                _prefill(findings, bench, device, tiny)
        for mode, sizes in modes.items():
            with findings.attempt("W", model=shape, weights=weights, mode=mode):
                _runs(findings, bench, shape, weights, mode, sizes, work, copy)
        del bench
        _give_back(device)  # two sets of weights may be more than the card has


def _modes(*, early: bool, wide: bool, counts: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """What is run of one set of weights, and with how many jobs at once."""
    if early:
        return {"early": (1,)}
    if not wide:
        return {"graphs+overlap": counts}
    few = counts[:2]
    return {"graphs+overlap": counts, "graphs": few, "eager": few, "general way": (1,)}


def _runs(
    findings: Findings, bench: Bench, shape: str, weights: str, mode: str,
    counts: tuple[int, ...], work: Workload, copy: float,
) -> None:  # fmt: skip
    one_row.Switch.on = mode != "general way"  # else layers of one token go the way of all others
    started = time.perf_counter()
    core = bench.core(**MODES[mode], max_num_seqs=max(counts))  # captures what is used
    ready = time.perf_counter() - started
    findings.put("started", model=shape, weights=weights, mode=mode, seconds=ready)
    head = {"model": shape, "weights": weights, "mode": mode}
    with made_ready(bench.device) as late:
        _served(findings, core, bench, head, counts, work, copy)
    findings.put("kernels that serving met first", **head, names=late, ok=not late)


def _served(
    findings: Findings, core: EngineCore, bench: Bench, of: dict[str, Any],
    counts: tuple[int, ...], work: Workload, copy: float,
) -> None:  # fmt: skip
    vocab = bench.decoder.spec.vocab_size
    mode = of["mode"]
    some = min(4, max(counts))  # more tokens than a graph has, where there are four
    for several in {1, some}:  # loads what is left of torch's own
        play(core, list(Workload(work.prompt, 4).requests(several, vocab)))
    for count in counts:
        if not findings.time_for(4):
            findings.put("stopped", before=f"{of['model']} {of['weights']} {mode} {count}")
            return
        figures = _timed(core, list(work.requests(count, vocab)), bench.device)
        read = figures.pop("read_bytes_s")
        figures["share_of_copy"] = read / copy if count == 1 else None
        head = of | {"concurrency": count}
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
        events = sound(core.step())
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
            head = {"model": shape, "weights": "bf16", "mode": "transformers"}
            with findings.attempt("W", **head, concurrency=count):
                rate = _generated(model, work, count, device)
                findings.put("W", **head, concurrency=count, output_tokens_s=rate)
        del model
        _give_back(device)


def _generated(model: Any, work: Workload, count: int, device: torch.device) -> float:
    """Output tokens a second."""
    requests = work.requests(count, model.config.vocab_size)
    ids = torch.tensor([list(r.prompt_token_ids) for r in requests], device=device)
    mask = torch.ones_like(ids)
    asked = {"max_new_tokens": work.output, "min_new_tokens": work.output,
             "do_sample": False, "pad_token_id": 0}  # fmt: skip
    model.generate(ids, attention_mask=mask, **asked | {"max_new_tokens": 2, "min_new_tokens": 2})
    synchronise(device)
    started = time.perf_counter()
    model.generate(ids, attention_mask=mask, **asked)
    synchronise(device)
    return count * work.output / (time.perf_counter() - started)


def main(part: str, lines: str, *more: str) -> None:
    """Run one part."""
    tiny = "--dry-run" in more
    device = torch.device("cpu" if tiny or not torch.cuda.is_available() else "cuda")
    findings = Findings(Path(lines))
    with tempfile.TemporaryDirectory() as folder:
        if part == "transformers":
            transformers_generate(findings, Path(folder), device, tiny)
        else:
            engine(findings, Path(folder), device, tiny, part.removeprefix("engine-"))


if __name__ == "__main__":
    main(*sys.argv[1:])
