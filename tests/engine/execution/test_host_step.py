"""The bench of what a step costs the host runs the engine's own parts, all of them."""

import importlib.util
from pathlib import Path

from tokenfleet.engine import SamplingParams

SCRIPT = Path(__file__).parents[3] / "ops/bench/host_step.py"


def test_the_bench_times_every_part_of_a_step_and_leaves_the_core_as_it_was():
    spec = importlib.util.spec_from_file_location("host_step", SCRIPT)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    bench.STEPS = 3
    core = bench.make_core(2, launched=False)
    bench.fill(core, 2, SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))
    step, parts = bench.measured(core)
    assert set(parts) == {"scheduling", "inputs, launch", "collecting", "settling", "figures"}
    assert step > 0
    assert core.stats.decode_tokens == 2
    assert "schedule" not in vars(core.scheduler)
    core.audit()
