"""Whatever arrives, ends, branches or is cut off: everyone gets the output of running alone.

The model here is a chain of hashes in real KV blocks: what a position holds depends on all tokens
before it, read through the block table. A block that was shared, copied, evicted or reused wrongly
changes the output, just as in attention. Its device computes a launched step only when somebody
waits for it or the history says so, from what it was told at the launch.
"""

import json
from collections import deque
from dataclasses import dataclass

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
from tokenfleet.engine.execution.flight import Flight, Outcome
from tokenfleet.engine.execution.loading import LoadedModel

VOCAB, EOS = 13, 12
MAX_LEN = 40


def link(cell: int, token: int) -> int:
    return hash((cell, token)) & 0xFFFFFFFF


def draw(cell: int, sequence_seed: int, choice: int) -> int:
    return hash((cell, sequence_seed, choice)) % VOCAB


@dataclass
class Order:
    """One chunk as the device was told of it at the launch."""

    chunk: object
    tokens: list  # those that the host knew
    table: list
    slot: int


@dataclass
class Launched:
    """A step in the device's queue."""

    flight: Flight
    copies: list
    orders: list
    outcomes: list | None = None

    def touches(self, block):
        return any(block in order.table for order in self.orders)


class HashModel:
    """Keeps one cell per KV position, with the copies and the block tables of the plan."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def __init__(self, num_blocks, block_size):
        self.size = block_size
        self.cells = [[None] * block_size for _ in range(num_blocks + 1)]
        self.newest = {}
        self.poisoned = set()
        self.queue = deque()
        self.most_in_flight = 0

    def launch(self, plan):
        assert plan.num_tokens == sum(chunk.count for chunk in plan.work)
        assert all(chunk.count == 1 for chunk in plan.decodes)
        self._check_reuse(plan)
        orders = [self._order(chunk) for chunk in plan.work]
        flight = Flight([])
        self.queue.append(Launched(flight, list(plan.copies), orders))
        self.most_in_flight = max(self.most_in_flight, len(self.queue))
        return flight

    def collect(self, flight):
        assert self.queue[0].flight is flight, "flights are collected in their order"
        self.compute(1)
        return self.queue.popleft().outcomes

    def compute(self, steps):
        """Let the device get on with the oldest steps of its queue."""
        for step in list(self.queue)[:steps]:
            if step.outcomes is None:
                copied = [(to, list(self.cells[source])) for source, to in step.copies]
                for to, content in copied:
                    self.cells[to] = content
                step.outcomes = [self._compute(order) for order in step.orders]

    def _check_reuse(self, plan):
        """What a step that is not settled touches is given to nobody else."""
        for step in self.queue:
            for sequence, first in plan.grown:
                others = [o for o in step.orders if o.chunk.sequence is not sequence]
                for block in sequence.block_table[first:]:
                    assert not any(block in order.table for order in others)
            slots = {order.slot for order in step.orders}
            assert not slots & {sequence.slot for sequence in plan.admitted}

    def _order(self, chunk):
        sequence = chunk.sequence
        assert sequence.slot >= 0
        if chunk.samples and sequence.constraint is not None:
            assert len(sequence.constraint.seen) == sequence.num_known - 1 - sequence.num_prompt
        return Order(chunk, list(sequence.tokens), list(sequence.block_table), sequence.slot)

    def _compute(self, order):
        chunk, table = order.chunk, order.table
        sequence = chunk.sequence
        cell = 0
        for position in range(chunk.start + chunk.count):
            known = position < len(order.tokens)
            cell = link(cell, order.tokens[position] if known else self.newest[order.slot])
            block = self.cells[table[position // self.size]]
            if position < chunk.start:
                assert block[position % self.size] == cell
            block[position % self.size] = cell
        self.newest[order.slot] = 0
        if sequence.request_id in self.poisoned:
            return Outcome(chunk, error="poisoned")
        token = draw(cell, sequence.seed, sequence.choice) if chunk.samples else -1
        self.newest[order.slot] = token
        return Outcome(chunk, token)


class Counted:
    """A grammar of any `length` tokens."""

    def __init__(self, length, seen=()):
        self.length, self.seen = length, list(seen)

    @property
    def complete(self):
        return len(self.seen) >= self.length

    def accept(self, token):
        self.seen.append(token)

    def copy(self):
        return Counted(self.length, self.seen)


class CountedCompiler:
    """Compiles {"regex": "3"} to a grammar of three tokens."""

    def compile(self, wanted):
        return Counted(int(wanted["regex"]))


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
        if len(out) == grammar_length(params):
            break
        cell = link(cell, token)
    return out


def grammar_length(params):
    return params.structured_outputs and int(params.structured_outputs["regex"])


def start(num_blocks, block_size, budget, slots, chunk, prefix_cache, overlap=False):
    config = EngineConfig(
        model=".",
        max_num_seqs=slots,
        max_num_batched_tokens=max(budget, slots),
        max_chunk_tokens=chunk,
        prefix_cache=prefix_cache,
    )
    model = HashModel(num_blocks, block_size)
    loaded = LoadedModel(model, model, MAX_LEN, block_size, num_blocks, overlap=overlap)
    compiler = CountedCompiler()
    core = EngineCore(config, load=lambda _config, _known: loaded, compiler=compiler)
    for length in range(1, 4):  # known already: no history depends on a thread
        wanted = {"regex": str(length)}
        core._compiling._known[json.dumps(wanted)] = compiler.compile(wanted)
    return core, model


class History:
    """Drives a core and remembers what everyone got."""

    def __init__(self, core, model):
        self.core, self.model = core, model
        self.requests, self.outputs, self.ends = {}, {}, {}
        self.aborted = set()
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
            if refusal.code not in ("never_fits", "unknown_id", "unsupported_grammar"):
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
            self.aborted |= {key for key in live if key[0] == name}

    def device(self, steps):
        self.model.compute(steps)

    def late(self, pick):
        """A stop string was found in the text of a choice, after the engine went on."""
        live = [key for key in self._live() if self.outputs[key] and key not in self.aborted]
        if live:
            key = live[pick % len(live)]
            self.core.finish(*key)
            self.ends[key] = "found"

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
            if reason in ("cancelled", "error", "found"):
                assert got == expected[: len(got)]
            else:
                assert got == expected
                params = self.requests[name][1]
                stopped = EOS in got and not params.ignore_eos
                stopped |= bool(got) and len(got) == grammar_length(params)
                assert reason == ("stop" if stopped else "length")
        assert self.core.scheduler.pool.num_used == 0
        assert not self.model.queue


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=MAX_LEN - 1)
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
    script, block_size, spare, budget, slots, chunk, prefix_cache, overlap
):
    one_sequence = -(-MAX_LEN // block_size)
    pool = max(one_sequence, int(spare * one_sequence))
    history = History(*start(pool, block_size, budget, slots, chunk, prefix_cache, overlap))
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


def overlapping(num_blocks=100, slots=4):
    core, model = start(num_blocks, 4, 64, slots, None, prefix_cache=True, overlap=True)
    return History(core, model)


def test_the_next_step_is_launched_before_the_last_one_is_settled():
    history = overlapping()
    history.add([1, 2, 3], SamplingParams(max_tokens=6, seed=3, ignore_eos=True))
    history.step()
    assert history.outputs["r0", 0] == []
    for made in range(1, 6):
        history.step()
        assert len(history.outputs["r0", 0]) == made
        assert len(history.model.queue) == 1
    history.drain()
    history.check()
    assert history.model.most_in_flight == 2


def test_blocks_and_slot_of_an_aborted_sequence_return_only_after_the_step_that_writes_to_them():
    history = overlapping(num_blocks=10, slots=1)
    history.add([1] * 20, SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    history.step()
    history.abort(0, whole=True)
    history.add([2] * 20, SamplingParams(max_tokens=1, seed=1, ignore_eos=True))
    pool, scheduler = history.core.scheduler.pool, history.core.scheduler
    assert (pool.num_used, scheduler.free_slots) == (5, [])
    history.step()
    assert history.ends == {("r0", 0): "cancelled"}
    assert (pool.num_used, scheduler.free_slots) == (0, [0])
    history.drain()
    history.check()


def test_a_late_seen_end_wastes_one_token_that_nobody_gets():
    seed = next(s for s in range(99) if EOS in alone([1], SamplingParams(max_tokens=9, seed=s), 0))
    history = overlapping()
    history.add([1], SamplingParams(max_tokens=30, seed=seed))
    history.drain()
    history.check()
    made = len(history.outputs["r0", 0])
    assert history.core.stats.prefill_tokens_total + history.core.stats.decode_tokens_total == (
        1 + made
    )


def test_an_end_by_length_wastes_nothing():
    history = overlapping()
    history.add([1], SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    history.drain()
    assert history.core.stats.decode_tokens_total == 4


def test_a_constrained_sequence_waits_for_its_token_and_nobody_else_does():
    history = overlapping()
    grammar = {"regex": "3"}
    history.add([1], SamplingParams(max_tokens=9, seed=1, structured_outputs=grammar))
    history.add([2], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    for _ in range(5):
        history.step()
    assert len(history.outputs["r1", 0]) == 4
    assert len(history.outputs["r0", 0]) == 2
    history.drain()
    history.check()


def test_a_starved_step_settles_everything_before_it_preempts():
    history = overlapping(num_blocks=15)
    for i in range(6):
        history.add([i % 3] * 8, SamplingParams(max_tokens=30, seed=i, ignore_eos=True))
    history.drain()
    history.check()
    assert history.core.stats.preemptions_total > 0
    assert history.model.most_in_flight == 2
