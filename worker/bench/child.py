"""One engine under test in a process of its own: ours, or transformers.

A process of its own, because its environment and its peak memory are its alone.
"""

from __future__ import annotations

import time
from typing import Any

from tokenfleet.worker.bench.figures import Seen, figures_of
from tokenfleet.worker.bench.line_protocol import Jobs, Opener, Runner, serve


def open_engine(options: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """Our engine's core: token ids in, token ids out."""
    from tokenfleet.engine.config import EngineConfig
    from tokenfleet.engine.core import EngineCore  # before torch: it decides how threads wait

    import torch  # isort: skip

    torch.set_num_threads(options["threads"])
    core: Any = EngineCore(EngineConfig(**options["config"]))
    facts = {
        "dtype": str(core.runner.model.decoder.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "block_size": core.limits.block_size,
        "blocks": core.stats.blocks_total,
        "vocab_size": core.spec.vocab_size,
    }
    return lambda jobs, _: run_core(core, jobs), facts


def run_core(core: Any, jobs: Jobs) -> dict[str, float]:
    """All jobs at once through an engine core, with what each step held."""
    from tokenfleet.engine.request import EngineRequest
    from tokenfleet.engine.sampling_params import SamplingParams

    asked_at = time.perf_counter()
    seen = {str(number): Seen(asked_at) for number in range(len(jobs))}
    for number, (prompt, output) in enumerate(jobs):
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(str(number), prompt, params))
    steps = 0
    used, needed, spare = 0, 0, 0.0
    while core.has_work:
        events = core.step()
        now = time.perf_counter()
        for event in events:
            seen[event.id].tokens(now, len(event.token_ids))
        stats = core.stats
        steps += 1
        used, needed = max(used, stats.blocks_used), max(needed, stats.blocks_needed)
        if stats.running:
            over = (stats.blocks_used - stats.blocks_needed) / stats.running
            spare = max(spare, over)
    figures = figures_of(list(seen.values()))
    return figures | {
        "steps": steps,
        "mean_batch": figures["output_tokens"] / max(1, steps),
        "blocks_used_max": used,
        "blocks_needed_max": needed,
        "blocks_spare_per_sequence_max": spare,
    }


def open_transformers(options: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """transformers' `generate` on the same weights, in static batches."""
    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    hf_logging: Any = transformers.utils.logging
    hf_logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        options["config"]["model"], dtype=getattr(torch, options["dtype"])
    )
    model.eval()
    facts = {"torch": torch.__version__, "transformers": transformers.__version__}
    return lambda jobs, command: run_generate(model, jobs, command["batch"]), facts


def run_generate(model: Any, jobs: Jobs, batch_size: int) -> dict[str, float]:
    """Batches one after the other, each as long as its longest job; only asked-for tokens count."""
    import torch

    asked_at = time.perf_counter()
    seen = [Seen(asked_at) for _ in jobs]
    steps = 0
    for start in range(0, len(jobs), batch_size):
        batch = range(start, min(start + batch_size, len(jobs)))
        times: list[float] = []

        def clock(input_ids: Any, scores: Any, times: list[float] = times) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        prompts = torch.tensor([jobs[number][0] for number in batch])
        longest = max(jobs[number][1] for number in batch)
        with torch.inference_mode():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                stopping_criteria=[clock],
                pad_token_id=0,
            )
        steps += len(times)
        for number in batch:
            for moment in times[: jobs[number][1]]:
                seen[number].tokens(moment, 1)
    figures = figures_of(seen)
    return figures | {"steps": steps, "mean_batch": figures["output_tokens"] / steps}


_OPENERS: dict[str, Opener] = {"tokenfleet": open_engine, "transformers": open_transformers}

if __name__ == "__main__":
    serve(_OPENERS)
