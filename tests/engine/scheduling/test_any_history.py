"""Whatever arrives, ends, branches or is cut off: everyone gets the output of running alone."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenfleet.engine import SamplingParams

LONGEST_PROMPT = 39
"""One below the model's longest sequence."""

prompts = st.lists(st.integers(0, 3), min_size=1, max_size=LONGEST_PROMPT)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 12),
    n=st.sampled_from([1, 1, 1, 2, 4]),
    seed=st.integers(0, 5),
    structured_outputs=st.sampled_from([None, None, None, {"regex": "1"}, {"regex": "3"}]),
)
moves = st.one_of(
    st.tuples(st.just("add"), prompts, params, st.integers(0, 2), st.sampled_from(["", "a"])),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 99), st.booleans()),
    st.tuples(st.just("fork"), st.integers(0, 99), params),
    st.tuples(st.just("poison"), st.integers(0, 99)),
    st.tuples(st.just("late"), st.integers(0, 99)),
    st.tuples(st.just("device"), st.integers(1, 2)),
)


@pytest.mark.timeout(400)
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    script=st.lists(moves, max_size=25),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare=st.floats(1.0, 6.0),
    budget=st.sampled_from([1, 3, 8, 64]),
    slots=st.integers(1, 5),
    chunk=st.sampled_from([None, 1, 3]),
    prefix_cache=st.booleans(),
    overlap=st.booleans(),
)
def test_any_history_gives_everyone_the_output_of_running_alone(
    world, script, block_size, spare, budget, slots, chunk, prefix_cache, overlap
):
    one_sequence = -(-world.MAX_LEN // block_size)
    pool = max(one_sequence, int(spare * one_sequence))
    history = world.History(
        *world.start(pool, block_size, budget, slots, chunk, prefix_cache, overlap)
    )
    for name, *arguments in script:
        if name == "step":
            for _ in range(arguments[0]):
                history.step()
        elif name == "abort":
            history.abort(arguments[0], whole=arguments[1])
        else:
            getattr(history, name)(*arguments)
            history.core.audit()
    history.drain()
    history.check()


def test_a_pool_of_one_and_a_half_sequences_serves_many_in_turn(world):
    core, model = world.start(15, 4, 8, 4, None, prefix_cache=True)
    history = world.History(core, model)
    for i in range(20):
        history.add([i % 3] * 8, SamplingParams(max_tokens=30, seed=i, ignore_eos=True))
    history.drain()
    history.check()
    assert core.stats.preemptions_total > 0
