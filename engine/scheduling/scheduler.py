"""Decides what one step computes. One token budget, no phases.

Every sequence is (tokens computed, tokens known), and a step gives each `min(missing, budget left,
chunk)`. Decode, chunked prefill, a prefix hit, resumption and a further sample of the same prompt
are all this one rule. Running sequences come first, the ones that miss a single token before all,
so a decode never waits for a prompt; then waiting ones, in order, while budget, slots and blocks
last.

No prompt is cut where it can be whole: one that fits a step of its own is not begun in what a step
that is more than half full has left. It would end no earlier, and those before it later.

When blocks run out, the running sequence that is last in order is preempted: its blocks go back and
it waits again, at its old place. Nothing is admitted in a step that preempted, and an admission
leaves one block for each running sequence, so two sequences do not evict each other in turn. The
first in order is never preempted for another, which is why everyone ends.

A step may be scheduled while others are in flight. What such a step touches is given back only when
its result has arrived, whoever ended meanwhile; so nothing is preempted then, and a plan that would
have to says so (`starved`).
"""

from __future__ import annotations

from bisect import insort

from tokenfleet.engine.errors import InvariantBroken
from tokenfleet.engine.scheduling.block_pool import BlockPool
from tokenfleet.engine.scheduling.block_tables import BlockTables
from tokenfleet.engine.scheduling.limits import Limits
from tokenfleet.engine.scheduling.plan import Chunk, StepPlan
from tokenfleet.engine.scheduling.prefix_cache import PrefixCache
from tokenfleet.engine.scheduling.prefixes import Prefix, Prefixes
from tokenfleet.engine.scheduling.sequence import Sequence, SequenceState
from tokenfleet.engine.scheduling.waiting import WaitingQueue

_RUNNING = SequenceState.RUNNING


class Scheduler:
    """Owns the sequences' states, slots and block tables.

    Calls follow each other as: add*, schedule, (the step runs), complete, finish*. Several plans
    may be scheduled before the first of them is completed; they complete in the same order.
    """

    def __init__(self, limits: Limits, pool: BlockPool, cache: PrefixCache | None) -> None:
        self.limits = limits
        self.pool = pool
        self.cache = cache
        self._prefixes = Prefixes(limits, cache)
        self._tables = BlockTables(limits, pool)
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.limbo: set[Sequence] = set()
        """Ended while a step in flight still writes to their blocks."""
        self._scheduled = self._completed = 0
        """Plans with work, by the number of the last one."""
        self._blocked: tuple[Sequence, int] | None = None
        self.cache_queries = 0
        self.cache_hits = 0
        self.preemptions = 0

    # -- arrivals and ends -----------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait; HELD behind its parent until that one's prompt is computed."""
        parent = sequence.parent
        if parent is not None and self._must_hold(sequence, parent):
            self.waiting.hold(sequence, parent)
        else:
            self.waiting.push(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence at any stage. Its blocks return once no step in flight writes to them."""
        if sequence.state is SequenceState.FINISHED:
            return
        was = sequence.state
        sequence.move(SequenceState.FINISHED)
        sequence.parent = None
        if was is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._let_go(sequence)
        else:
            self.waiting.ended(was)
        self.waiting.release(sequence)

    def complete(self, plan: StepPlan) -> None:
        """The step's result is here: its tokens were appended and its KV is written."""
        self._completed += 1
        size = self.limits.block_size
        for chunk in plan.work:
            sequence = chunk.sequence
            if sequence.state is _RUNNING:
                done = sequence.num_done = chunk.start + chunk.count
                if done - sequence.num_committed * size >= size:
                    self._prefixes.commit(sequence, done)
                if sequence.children and done >= sequence.num_prompt:
                    self.waiting.release(sequence)
            elif sequence in self.limbo:
                self._settle(sequence)

    def restart(self) -> None:
        """Let every running sequence wait again, its KV forgotten. Steps in flight are given up:
        they are not completed any more."""
        self._completed = self._scheduled
        for sequence in list(self.limbo):
            self._settle(sequence)
        for sequence in self.running[:]:
            sequence.num_known = len(sequence.tokens)
            self._preempt(StepPlan(), sequence)

    @property
    def steps_in_flight(self) -> int:
        """Plans with work that were scheduled and not completed."""
        return self._scheduled - self._completed

    @property
    def num_free_slots(self) -> int:
        """Slots that neither a running nor a waiting sequence will take."""
        waiting = self.waiting.num_waiting + self.waiting.num_held
        return self.limits.max_num_seqs - len(self.running) - waiting

    @property
    def num_needed_blocks(self) -> int:
        """Blocks that the running sequences' tokens would fill, were nothing shared."""
        size = self.limits.block_size
        return sum([-(-sequence.num_known // size) for sequence in self.running])

    # -- one step --------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Choose the work of the next step, and account for it as if it were done."""
        plan = StepPlan()
        left = self._plan_running(plan, self.limits.max_num_batched_tokens)
        if not (plan.preempted or plan.starved):
            self._admit(plan, left)
        self._scheduled += bool(plan)
        return plan

    def _plan_running(self, plan: StepPlan, left: int) -> int:
        catching_up = []
        step, quick = self._scheduled + 1, 0
        for sequence in self.running[:]:
            if plan.preempted and sequence.state is not _RUNNING:
                continue
            computed, known = sequence.num_computed, sequence.num_known
            if known - computed > 1:
                catching_up.append(sequence)
            elif (
                left > 0
                and computed < sequence.num_owned
                and known < sequence.max_len
                and not sequence.looks_back
            ):  # as _plan does it: nearly all sequences, so it has to be quick
                plan.decodes.append(Chunk(sequence, computed, 1, True))
                sequence.num_computed, sequence.num_known = known, known + 1
                sequence.last_step = step
                left -= 1
                quick += 1
            elif not sequence.must_wait:
                left -= self._plan(plan, sequence, min(1, left))
        plan.num_tokens += quick
        for sequence in catching_up:
            if sequence.state is _RUNNING and left:
                left -= self._plan(plan, sequence, self._share(sequence, left))
        return left

    def _admit(self, plan: StepPlan, left: int) -> None:
        while left and self.free_slots:
            sequence = self.waiting.first()
            if sequence is None or self._still_blocked(sequence):
                return
            prefix = self._prefixes.known(sequence)
            if self._better_later(plan, sequence.num_known - prefix.tokens, left):
                return
            if not self._leaves_room(sequence, prefix.blocks):
                self._blocked = (sequence, self.pool.num_free)
                return
            self.waiting.pop_first()
            self._start(sequence, prefix)
            plan.admitted.append(sequence)
            left -= self._plan(plan, sequence, self._share(sequence, left))

    def _plan(self, plan: StepPlan, sequence: Sequence, tokens: int) -> int:
        """Add up to `tokens` of a sequence; 0 when it had to give its blocks up instead."""
        if tokens <= 0 or not self._make_room(plan, sequence, sequence.num_computed + tokens):
            return 0
        samples = sequence.num_computed + tokens == sequence.num_known
        chunk = Chunk(sequence, sequence.num_computed, tokens, samples)
        (plan.decodes if tokens == 1 else plan.chunks).append(chunk)
        sequence.num_computed += tokens
        sequence.num_known += samples
        sequence.last_step = self._scheduled + 1
        plan.num_tokens += tokens
        return tokens

    def _share(self, sequence: Sequence, left: int) -> int:
        limits = self.limits
        allowed = min(left, limits.max_chunk_tokens or left)
        others = len(self.running) > 1 or self.waiting.num_waiting
        if others and sequence.num_missing > limits.long_prompt:
            allowed = min(allowed, max(1, left // 2))
        return min(sequence.num_missing, allowed)

    def _better_later(self, plan: StepPlan, missing: int, left: int) -> bool:
        """Whether a prompt that fits the next step would be cut to fill this one."""
        limits = self.limits
        room = limits.max_num_batched_tokens - len(plan.decodes)
        wanted = min(missing, limits.max_chunk_tokens or missing)
        return left < wanted <= room and 2 * left < room

    # -- blocks ----------------------------------------------------------------------------

    def _make_room(self, plan: StepPlan, sequence: Sequence, upto: int) -> bool:
        """Own every block up to token `upto`, preempting from the end of the order.

        With steps in flight nobody is preempted: the plan is starved, and this one waits.
        """
        if upto <= sequence.num_owned:
            return True
        while (missing := self._tables.missing(sequence, upto)) > self.pool.num_free:
            if self.steps_in_flight:
                plan.starved = True
                return False
            victim = self.running[-1]
            self._preempt(plan, victim)
            if victim is sequence:
                return False
        self._tables.grow(plan, sequence, missing)
        return True

    # -- admission and preemption ----------------------------------------------------------

    def _still_blocked(self, sequence: Sequence) -> bool:
        """Whether this one was refused for want of blocks and none has come free since."""
        if self._blocked is None or not self.running:
            return False
        blocked, free = self._blocked
        return blocked is sequence and self.pool.num_free <= free

    def _leaves_room(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether all known tokens fit, with one block to spare for each running sequence.

        A shared partial block is copied at the first write: one more, unless nothing runs.
        """
        needed = self.limits.blocks_for(sequence.num_known) - len(shared)
        spare = len(self.running) + bool(self.running)
        return needed + spare <= self.pool.num_free - self.pool.num_free_in(shared)

    def _start(self, sequence: Sequence, prefix: Prefix) -> None:
        self._tables.start(sequence, prefix)
        sequence.slot = self.free_slots.pop()
        sequence.move(SequenceState.RUNNING)
        if sequence.parent is not None:
            sequence.parent.num_owned = 0  # its last block may be shared from now on
            sequence.parent = None
        if sequence.use_cache:
            self.cache_queries += len(sequence.tokens)
            self.cache_hits += prefix.tokens
        insort(self.running, sequence, key=_order_of)

    def _preempt(self, plan: StepPlan, victim: Sequence) -> None:
        plan.drop(victim)
        if self.steps_in_flight:
            raise InvariantBroken(f"sequence {victim.request_id} is in flight and was preempted")
        victim.last_step = self._completed
        self.running.remove(victim)
        self._let_go(victim)
        self.preemptions += 1
        self.waiting.push(victim)
        self.waiting.release(victim)
        plan.preempted.append(victim)

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.last_step > self._completed:
            self.limbo.add(sequence)
        else:
            self._return_everything(sequence)

    def _settle(self, sequence: Sequence) -> None:
        if sequence.last_step <= self._completed:
            self.limbo.discard(sequence)
            self._return_everything(sequence)

    def _return_everything(self, sequence: Sequence) -> None:
        self._tables.give_back(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot = -1

    def _must_hold(self, sequence: Sequence, parent: Sequence) -> bool:
        ended = parent.state is SequenceState.FINISHED
        return not ended and parent.num_done < min(sequence.shared_limit, len(sequence.tokens) - 1)


def _order_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
