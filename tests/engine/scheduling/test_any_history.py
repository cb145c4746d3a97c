"""Whatever arrives, ends, branches or is cut off: everyone gets the output of running alone.

The model here is a chain of hashes in real KV blocks: what a position holds depends on all tokens
before it, read through the block table. A block that was shared, copied, evicted or reused wrongly
changes the output, just as in attention.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenfleet.engine import (
    EngineConfig,
    EngineCore,
    EngineRequest,
    InvalidRequest,
    SamplingParams,
)
from tokenfleet.engine.execution.loading import LoadedModel
from tokenfleet.engine.execution.runner import Outcome, Timing

VOCAB, EOS = 13, 12
MAX_LEN = 40


def link(cell: int, token: int) -> int:
    return hash((cell, token)) & 0xFFFFFFFF


def draw(cell: int, sequence_seed: int, choice: int) -> int:
    return hash((cell, sequence_seed, choice)) % VOCAB


class HashModel:
    """Keeps one cell per KV position, with the copies and the block tables of the plan."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def __init__(self, num_blocks, block_size):
        self.timing = Timing()
        self.size = block_size
        self.cells = [[None] * block_size for _ in range(num_blocks + 1)]
        self.poisoned = set()

    def run(self, plan):
        copied = [(to, list(self.cells[source])) for source, to in plan.copies]
        for to, content in copied:
            self.cells[to] = content
        assert plan.num_tokens == sum(chunk.count for chunk in plan.work)
        assert all(chunk.count == 1 for chunk in plan.decodes)
        return [self._compute(chunk) for chunk in plan.work]

    def _compute(self, chunk):
        sequence, table = chunk.sequence, chunk.sequence.block_table
        cell = 0
        for position in range(chunk.start):
            cell = link(cell, sequence.tokens[position])
            assert self.cells[table[position // self.size]][position % self.size] == cell
        for position in range(chunk.start, chunk.start + chunk.count):
            cell = link(cell, sequence.tokens[position])
            self.cells[table[position // self.size]][position % self.size] = cell
        if sequence.request_id in self.poisoned:
            return Outcome(chunk, error="poisoned")
        token = draw(cell, sequence.seed, sequence.choice) if chunk.samples else -1
        return Outcome(chunk, token)


def alone(prompt, params, choice):
    """The output of a choice computed with nothing else in the world."""
    cell, out = 0, []
    for token in prompt:
        cell = link(cell, token)
    while len(out) < params.max_tokens and len(prompt) + len(out) < MAX_LEN:
        token = draw(cell, params.seed, choice)
        out.append(token)
        if token == EOS and not params.ignore_eos:
            break
        cell = link(cell, token)
    return out


def start(num_blocks, block_size, budget, slots, chunk, prefix_cache):
    config = EngineConfig(
        model=".",
        max_num_seqs=slots,
        max_num_batched_tokens=max(budget, slots),
        max_chunk_tokens=chunk,
        prefix_cache=prefix_cache,
    )
    model = HashModel(num_blocks, block_size)
    loaded = LoadedModel(model, model, MAX_LEN, block_size, num_blocks)
    return EngineCore(config, load=lambda _config, _known: loaded), model


class History:
    """Drives a core and remembers what everyone got."""

    def __init__(self, core, model):
        self.core, self.model = core, model
        self.requests, self.outputs, self.ends = {}, {}, {}
        self.steps = 0

    def add(self, prompt, params, priority=0, salt=""):
        name = f"r{len(self.requests)}"
        request = EngineRequest(name, prompt, params, priority=priority, cache_salt=salt)
        try:
            self.core.add(request)
        except InvalidRequest as refusal:
            if refusal.code != "never_fits":
                raise
            return
        self._remember(name, prompt, params)

    def fork(self, pick, params):
        live = self._live()
        if not live:
            return
        name, choice = live[pick % len(live)]
        new = f"r{len(self.requests)}"
        prompt = tuple(self.requests[name][0]) + tuple(self.outputs[name, choice])
        try:
            self.core.fork(name, new, params, choice)
        except InvalidRequest as refusal:
            # unknown_id: it has ended, and its last event comes with the next step
            if refusal.code not in ("never_fits", "unknown_id"):
                raise
            return
        self._remember(new, prompt, params)

    def _remember(self, name, prompt, params):
        self.requests[name] = (prompt, params)
        for choice in range(params.n):
            self.outputs[name, choice] = []

    def abort(self, pick, *, whole):
        live = self._live()
        if live:
            name, choice = live[pick % len(live)]
            self.core.abort(name, None if whole else choice)

    def poison(self, pick):
        live = self._live()
        if live:
            self.model.poisoned.add(live[pick % len(live)][0])

    def _live(self):
        return [key for key in self.outputs if key not in self.ends]

    def step(self):
        self.steps += 1
        for event in self.core.step():
            key = (event.id, event.choice)
            assert key not in self.ends, "an event came after the last one"
            self.outputs[key] += event.token_ids
            if event.finish_reason is not None:
                self.ends[key] = event.finish_reason
        self.core.audit()

    def drain(self):
        bound = 50 + 60 * sum(MAX_LEN for _ in self.outputs)
        while self.core.has_work:
            self.step()
            assert self.steps < bound, "the engine does not come to an end"

    def check(self):
        assert set(self.ends) == set(self.outputs)
        for (name, choice), reason in self.ends.items():
            expected = alone(*self.requests[name], choice)
            got = self.outputs[name, choice]
            if reason in ("cancelled", "error"):
                assert got == expected[: len(got)]
            else:
                assert got == expected
                stopped = EOS in got and not self.requests[name][1].ignore_eos
                assert reason == ("stop" if stopped else "length")
        assert self.core.scheduler.pool.num_used == 0


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=MAX_LEN - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 12),
    n=st.sampled_from([1, 1, 1, 2, 4]),
    seed=st.integers(0, 5),
)
moves = st.one_of(
    st.tuples(st.just("add"), prompts, params, st.integers(0, 2), st.sampled_from(["", "a"])),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 99), st.booleans()),
    st.tuples(st.just("fork"), st.integers(0, 99), params),
    st.tuples(st.just("poison"), st.integers(0, 99)),
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
)
def test_any_history_gives_everyone_the_output_of_running_alone(
    script, block_size, spare, budget, slots, chunk, prefix_cache
):
    one_sequence = -(-MAX_LEN // block_size)
    pool = max(one_sequence, int(spare * one_sequence))
    history = History(*start(pool, block_size, budget, slots, chunk, prefix_cache))
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


def test_a_pool_of_one_and_a_half_sequences_serves_many_in_turn():
    core, model = start(15, 4, 8, 4, None, prefix_cache=True)
    history = History(core, model)
    for i in range(20):
        history.add([i % 3] * 8, SamplingParams(max_tokens=30, seed=i, ignore_eos=True))
    history.drain()
    history.check()
    assert core.stats.preemptions_total > 0


def test_freed_slot_is_filled_in_the_next_step():
    core, model = start(100, 4, 64, 2, None, prefix_cache=False)
    history = History(core, model)
    for length in (1, 5, 5):
        history.add([1, 2, 3], SamplingParams(max_tokens=length, seed=3, ignore_eos=True))
    history.step()
    assert history.ends == {("r0", 0): "length"}
    history.step()
    assert core.stats.running == 2
    assert len(history.outputs["r2", 0]) == 1


def test_a_decode_never_waits_for_a_prompt():
    core, model = start(100, 4, 8, 4, None, prefix_cache=False)
    history = History(core, model)
    history.add([1], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    history.step()
    history.add([2] * 30, SamplingParams(max_tokens=1, seed=1))
    history.add([3] * 30, SamplingParams(max_tokens=1, seed=1))
    for made in range(2, 12):
        history.step()
        assert len(history.outputs["r0", 0]) == made


def test_a_huge_prompt_leaves_half_of_the_budget_to_short_ones():
    core, model = start(400, 4, 4, 4, None, prefix_cache=False)
    history = History(core, model)
    history.add([1] * 39, SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
    history.add([2, 2], SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
    history.step()
    assert ("r1", 0) in history.ends


def test_samples_share_the_prompts_blocks_and_copy_only_the_last():
    core, model = start(400, 4, 64, 16, None, prefix_cache=True)
    history = History(core, model)
    history.add([1] * 30, SamplingParams(max_tokens=4, n=16, seed=1, ignore_eos=True))
    history.step()
    history.step()
    assert core.stats.running == 16
    assert core.scheduler.pool.num_used <= 8 + 15 + 16
    history.drain()
    history.check()


def test_a_full_prefix_hit_still_computes_the_last_token():
    for prompt in ([1, 2, 3, 1] * 4, ([1, 2, 3, 1] * 4)[:-1], [1, 2, 3, 1] * 4 + [2]):
        core, model = start(400, 4, 64, 4, None, prefix_cache=True)
        history = History(core, model)
        for _ in range(3):
            history.add(prompt, SamplingParams(max_tokens=3, seed=1))
            history.drain()
        history.check()
        assert core.stats.cache_hits_total > 0


def test_a_salt_keeps_prefixes_apart():
    core, model = start(400, 4, 64, 4, None, prefix_cache=True)
    history = History(core, model)
    for salt in ("a", "b"):
        history.add([1] * 20, SamplingParams(max_tokens=2, seed=1), salt=salt)
        history.drain()
    assert core.stats.cache_hits_total == 0
    history.add([1] * 20, SamplingParams(max_tokens=2, seed=1), salt="a")
    history.drain()
    assert core.stats.cache_hits_total == 16


def test_a_step_costs_the_same_however_many_wait():
    core, _ = start(100, 4, 64, 2, None, prefix_cache=True)
    for i in range(2000):
        core.add(EngineRequest(f"w{i}", [i % 4] * 13, SamplingParams(max_tokens=3, seed=1)))
    touched = 0

    class Counting(dict):
        def get(self, *args):
            nonlocal touched
            touched += 1
            return super().get(*args)

    core.cache._node_of = Counting(core.cache._node_of)
    for _ in range(5):
        core.step()
    assert touched < 100
