"""llama.cpp under test, through its C interface, run by the Python of its own environment.

It is driven as its server does: decodes of all running sequences and a piece of the prompts still
to be read share a batch of at most UBATCH tokens. Flash attention is off: on CPUs like the ones
this was written on it is slower by half and more.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenfleet.worker.bench.figures import Seen, figures_of
from tokenfleet.worker.bench.line_protocol import Jobs, Runner, serve

UBATCH = 512
_kept: list[Any] = []
"""What C code holds on to and Python must not forget."""


def open_llama(options: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """The model in one of llama.cpp's own formats, made from `gguf` where it is not there yet."""
    import llama_cpp

    _silence(llama_cpp)
    llama_cpp.llama_backend_init()
    path = converted(llama_cpp, Path(options["gguf"]), options["format"], Path(options["cache"]))
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = options["extra_buffers"]
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    facts = {
        "llama_cpp": llama_cpp.__version__,
        "format": options["format"],
        "extra_buffers": options["extra_buffers"],
    }
    threads = options["threads"]
    return lambda jobs, _: run_llama(llama_cpp, model, jobs, threads), facts


def _silence(llama_cpp: Any) -> None:
    """It says hundreds of lines for each context."""
    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    _kept.append(callback)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))


def converted(llama_cpp: Any, source: Path, format: str, cache: Path) -> Path:
    """The same weights as F16 or Q8_0, with no tensor left in the source's format."""
    path = cache / f"{source.stem}-{format}.gguf"
    if path.exists():
        return path
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{format}")
    params.allow_requantize = True
    params.nthread = 2
    partial = path.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), params):
        raise RuntimeError(f"llama.cpp cannot write {source} as {format}")
    partial.rename(path)
    return path


@dataclass(slots=True)
class _Sequence:
    prompt: list[int]
    left: int
    """Tokens still to be made."""
    seen: Seen
    read: int = 0
    """Prompt tokens in the cache."""
    last: int = -1
    """The newest token, not in the cache yet."""
    length: int = 0
    row: int = -1
    """Where in the batch its logits are."""


@dataclass(slots=True)
class _Batch:
    """llama_batch, filled token by token."""

    raw: Any

    def clear(self) -> None:
        self.raw.n_tokens = 0

    def add(self, token: int, position: int, sequence: int, *, logits: bool) -> int:
        row: int = self.raw.n_tokens
        self.raw.token[row] = token
        self.raw.pos[row] = position
        self.raw.n_seq_id[row] = 1
        self.raw.seq_id[row][0] = sequence
        self.raw.logits[row] = logits
        self.raw.n_tokens = row + 1
        return row


def run_llama(lib: Any, model: Any, jobs: Jobs, threads: int) -> dict[str, float]:
    """All jobs at once, in a context of their size; making it is not timed."""
    context = _context(lib, model, jobs, threads)
    sampler = lib.llama_sampler_init_greedy()
    batch = _Batch(lib.llama_batch_init(UBATCH, 0, 1))
    asked_at = time.perf_counter()
    sequences = [_Sequence(prompt, output, Seen(asked_at)) for prompt, output in jobs]
    steps = 0
    while any(sequence.left for sequence in sequences):
        _fill(batch, sequences)
        if lib.llama_decode(context, batch.raw):
            raise RuntimeError("llama_decode failed")
        steps += 1
        for sequence in sequences:
            if sequence.row >= 0:
                sequence.last = lib.llama_sampler_sample(sampler, context, sequence.row)
                sequence.left -= 1
                sequence.seen.tokens(time.perf_counter(), 1)
    lib.llama_batch_free(batch.raw)
    lib.llama_sampler_free(sampler)
    lib.llama_free(context)
    figures = figures_of([sequence.seen for sequence in sequences])
    return figures | {"steps": steps, "mean_batch": figures["output_tokens"] / steps}


def _fill(batch: _Batch, sequences: list[_Sequence]) -> None:
    """One step: every decode, then prompt tokens while there is room."""
    batch.clear()
    for number, sequence in enumerate(sequences):
        sequence.row = -1
        if sequence.left and sequence.last >= 0:
            sequence.row = batch.add(sequence.last, sequence.length, number, logits=True)
            sequence.length += 1
    for number, sequence in enumerate(sequences):
        while sequence.read < len(sequence.prompt) and batch.raw.n_tokens < UBATCH:
            sequence.read += 1
            whole = sequence.read == len(sequence.prompt)
            row = batch.add(
                sequence.prompt[sequence.read - 1], sequence.length, number, logits=whole
            )
            sequence.length += 1
            if whole:
                sequence.row = row


def _context(lib: Any, model: Any, jobs: Jobs, threads: int) -> Any:
    longest = max(len(prompt) + output for prompt, output in jobs)
    params = lib.llama_context_default_params()
    params.n_seq_max = len(jobs)
    params.n_ctx = len(jobs) * -(-(longest + 1) // 256) * 256
    params.n_batch = params.n_ubatch = UBATCH
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.offload_kqv = False
    params.no_perf = True
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp cannot make a context for {len(jobs)} sequences")
    return ctypes.cast(context, ctypes.c_void_p) if isinstance(context, int) else context


if __name__ == "__main__":
    serve({"llama.cpp": open_llama})
