"""A model of hashes in real KV blocks, a device that lags behind, and histories over both.

The model is a chain of hashes: what a position holds depends on all tokens before it, read through
the block table. A block that was shared, copied, evicted or reused wrongly changes the output, just
as in attention. Its device computes a launched step only when somebody waits for it or the history
says so, from what it was told at the launch.
"""

import json
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tokenfleet.engine import (
    EngineConfig,
    EngineCore,
    EngineRequest,
    InvalidRequest,
)
from tokenfleet.engine.execution.flight import Flight, Note, StepResult
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
    result: StepResult | None = None


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
        return self.queue.popleft().result

    def compute(self, steps):
        """Let the device get on with the oldest steps of its queue."""
        for step in list(self.queue)[:steps]:
            if step.result is None:
                copied = [(to, list(self.cells[source])) for source, to in step.copies]
                for to, content in copied:
                    self.cells[to] = content
                computed = [self._compute(order) for order in step.orders]
                notes = {row: Note(error="poisoned") for row, t in enumerate(computed) if t is None}
                step.result = StepResult([-1 if t is None else t for t in computed], notes)

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
            return None
        token = draw(cell, sequence.seed, sequence.choice) if chunk.samples else -1
        self.newest[order.slot] = token
        return token


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


def overlapping(num_blocks=100, slots=4):
    core, model = start(num_blocks, 4, 64, slots, None, prefix_cache=True, overlap=True)
    return History(core, model)


@pytest.fixture(scope="session")
def world():
    """The helpers above, as attributes."""
    names = (start, overlapping, alone, History)
    return SimpleNamespace(EOS=EOS, MAX_LEN=MAX_LEN, **{name.__name__: name for name in names})
