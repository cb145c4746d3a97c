"""vLLM under test, run by the Python of its own environment.

Its engine steps in this process, without a server in front and without a second process behind:
the form in which it is fastest here.
"""

from __future__ import annotations

import time
from typing import Any

from tokenfleet.worker.bench.figures import Seen, figures_of
from tokenfleet.worker.bench.line_protocol import Jobs, Runner, serve


def open_vllm(options: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """An LLMEngine on the checkpoint, prefix caching off, with room for all jobs at once."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=options["model"],
            dtype=options["dtype"],
            max_model_len=2048,
            max_num_seqs=options["slots"],
            enable_prefix_caching=False,
            seed=0,
        )
    )
    return lambda jobs, _: run_vllm(engine, jobs), {
        "vllm": vllm.__version__,
        "dtype": options["dtype"],
    }


def run_vllm(engine: Any, jobs: Jobs) -> dict[str, float]:
    """All jobs at once, step by step."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    asked_at = time.perf_counter()
    seen = {str(number): Seen(asked_at) for number in range(len(jobs))}
    for number, (prompt, output) in enumerate(jobs):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), params)
    steps = 0
    while engine.has_unfinished_requests():
        found = engine.step()
        now = time.perf_counter()
        steps += 1
        for output in found:
            seen[output.request_id].tokens(now, len(output.outputs[0].token_ids))
    figures = figures_of(list(seen.values()))
    return figures | {"steps": steps, "mean_batch": figures["output_tokens"] / steps}


if __name__ == "__main__":
    serve({"vllm": open_vllm})
