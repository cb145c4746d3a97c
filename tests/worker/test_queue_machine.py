"""Any order of moves by any workers, over a real server, against a model of what must hold.

Several workers claim, emit, finish, release, fail, die and come back as zombies; producers submit,
cancel and let deadlines pass; the script cache is flushed; limits of tenants come and go. After
every move the model is compared with Redis: logs are exactly the tokens that were accepted, in
order; terminal states never change; attempts only grow; no job is lost; no job has two owners; what
is counted of a tenant is what a walk over its jobs finds.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tokenfleet.producer.errors import QueueFull
from tokenfleet.producer.keys import PRIORITIES
from tokenfleet.producer.protocol import Choice, Event, EventError, JobResult, State
from tokenfleet.producer.states import MOVES
from tokenfleet.worker.claims import flat
from tokenfleet.worker.queue import ClaimedJob
from tokenfleet.worker.rules import EVERY_OTHER, Rules, TenantLimits

WORKERS = ("w1", "w2", "w3")
TENANTS = ("a", "b")
RESULT = JobResult(choices=(Choice(text="done", finish_reason="stop"),))


@dataclass
class Modelled:
    """What the model knows of a job."""

    id: str
    priority: str
    tenant: str
    tokens: list[int] = field(default_factory=list)
    state: State = State.WAITING
    attempt: int = 0
    cancelled: bool = False


@dataclass
class Held:
    """A claim that some worker believes to hold, rightly or as a zombie."""

    worker: str
    job: ClaimedJob
    offset: int


class QueueMachine(RuleBasedStateMachine):
    """One namespace, three workers, a few jobs."""

    make_lab: Any = None
    runner: asyncio.Runner

    @initialize()
    def open(self) -> None:
        self.lab = type(self).make_lab()
        self.jobs: dict[str, Modelled] = {}
        self.held: list[Held] = []
        self.token = 0
        self.queues = {w: self.do(self.lab.queue(w, max_failures=2)) for w in WORKERS}
        self.client = self.lab.client()
        self.rules = Rules(self.lab.connection)
        self.limits: dict[str, TenantLimits] = {}

    def do(self, call: Any) -> Any:
        return type(self).runner.run(call)

    def is_current(self, held: Held) -> bool:
        job = self.jobs[held.job.id]
        return job.state is State.RUNNING and job.attempt == held.job.attempt

    def pick(self, data: Any) -> Held:
        return data.draw(st.sampled_from(self.held))

    # producers

    @rule(priority=st.sampled_from(PRIORITIES), tenant=st.sampled_from(TENANTS))
    def submit(self, priority: str, tenant: str) -> None:
        if self.room(tenant, State.WAITING) <= 0:
            with pytest.raises(QueueFull):
                self.do(self.lab.submit(priority=priority, tenant=tenant))
            return
        job_id = self.do(self.lab.submit(priority=priority, tenant=tenant))
        self.jobs[job_id] = Modelled(job_id, priority, tenant)

    @rule(
        tenant=st.sampled_from((*TENANTS, EVERY_OTHER)),
        running=st.none() | st.integers(0, 3),
        waiting=st.none() | st.integers(0, 4),
    )
    def set_limits(self, tenant: str, running: int | None, waiting: int | None) -> None:
        self.limits[tenant] = TenantLimits(tenant, running, waiting)
        self.do(self.rules.set_limits(self.limits[tenant]))

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def remove_limits(self, data: Any) -> None:
        tenant = data.draw(st.sampled_from(sorted(self.limits)))
        del self.limits[tenant]
        self.do(self.rules.remove_limits(tenant))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        state = self.do(self.client.job(job.id).cancel())
        if job.state is State.WAITING:
            job.state = State.CANCELLED
        elif job.state is State.RUNNING:
            job.cancelled = True
        assert state == job.state

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def pass_deadline(self, data: Any) -> None:
        """The deadline of a waiting job passes, and someone looks."""
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        if job.state is State.WAITING:
            self.do(self.lab.raw.hset(self.lab.keys.job(job.id), "deadline", 1))
            assert self.do(self.client.job(job.id).status()).state is State.EXPIRED
            job.state = State.EXPIRED

    @rule()
    def flush_scripts(self) -> None:
        self.do(self.lab.raw.script_flush())

    # workers

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4), stands=st.booleans())
    def claim(self, worker: str, count: int, stands: bool = False) -> None:
        """Also one that waits at the server, where the worker has found nothing before."""
        self.make_due()
        claimable = sum(self.claimable(tenant) for tenant in TENANTS)
        queue = self.queues[worker]
        standing = queue.stand(count, timeout_s=0.0) if stands else None
        claimed = self.do(standing.jobs() if standing else queue.claim(count))
        assert len(claimed) == min(count, claimable)
        for one in claimed:
            self.took(worker, one)

    def took(self, worker: str, one: ClaimedJob) -> None:
        job = self.jobs[one.id]
        assert job.state is State.WAITING
        assert one.attempt == job.attempt + 1
        assert one.offset == len(job.tokens)
        assert [t for event in one.logged for t in event.token_ids] == job.tokens
        job.state, job.attempt = State.RUNNING, one.attempt
        self.held.append(Held(worker, one, one.offset))

    @precondition(lambda self: any(self.is_current(held) for held in self.held))
    @rule(worker=st.sampled_from(WORKERS))
    def swap(self, worker: str) -> None:
        """Batch jobs make way for more urgent ones, one for one."""
        self.make_due()
        mine = [held for held in self.held if held.worker == worker]
        batch = [held for held in mine if self.jobs[held.job.id].priority == "batch"]
        places = sum(self.is_current(held) for held in batch)
        waiting = {tenant: self.claimable(tenant, PRIORITIES[:-1]) for tenant in TENANTS}
        call = self.queues[worker].swap([held.job for held in batch])
        claimed, put_back = self.do(call)
        assert len(claimed) == len(put_back) == min(places, sum(waiting.values()))
        for held in [held for held in batch if held.job.id in put_back and self.is_current(held)]:
            self.back(self.jobs[held.job.id])
            self.held.remove(held)
        for one in claimed:
            assert one.priority != "batch"
            self.took(worker, one)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 3), lost_reply=st.booleans())
    def emit(self, data: Any, count: int, lost_reply: bool, held: Held | None = None) -> None:
        held = held or self.pick(data)
        events = tuple(self.event(held, held.offset + n) for n in range(count))
        emission = (held.job.id, held.job.attempt, flat(events))
        queue = self.queues[held.worker]
        if lost_reply:
            self.do(queue.emit([emission]))
        outcome = self.do(queue.emit([emission]))
        current = self.is_current(held)
        assert (held.job.id in outcome.fenced) is not current
        assert not outcome.behind
        if current:
            job = self.jobs[held.job.id]
            assert (held.job.id in outcome.cancelled) is job.cancelled
            job.tokens += [token for event in events for token in event.token_ids]
            held.offset += count

    @precondition(lambda self: self.held)
    @rule(data=st.data(), state=st.sampled_from(["finished", "failed", "cancelled"]))
    def finish(self, data: Any, state: str, held: Held | None = None) -> None:
        held = held or self.pick(data)
        current = self.is_current(held)
        event = self.event(held, held.offset)
        error = EventError("c", "m") if state == "failed" else None
        result = RESULT if state == "finished" else None
        call = self.queues[held.worker].finish
        done = self.do(call(held.job, flat([event]), result, state=state, error=error))
        if current:
            assert done
            job = self.jobs[held.job.id]
            job.tokens += event.token_ids
            job.state = State(state)
        self.held.remove(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        held = self.pick(data)
        current = self.is_current(held)
        released = self.do(self.queues[held.worker].release([held.job], "test"))
        assert (held.job.id in released) is current
        if current:
            self.back(self.jobs[held.job.id])
        self.held.remove(held)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        held = self.pick(data)
        current = self.is_current(held)
        state = self.do(self.queues[held.worker].fail(held.job, "c", "m", retryable=True))
        assert (state is not None) is current
        if current:
            self.jobs[held.job.id].state = State(state)
        self.held.remove(held)

    @precondition(lambda self: any(self.is_current(held) for held in self.held))
    @rule(data=st.data(), reaper=st.sampled_from(WORKERS))
    def lease_ends(self, data: Any, reaper: str, held: Held | None = None) -> None:
        """A worker goes silent past its lease; it stays as a zombie that may speak again."""
        current = [one for one in self.held if self.is_current(one)]
        held = held or data.draw(st.sampled_from(current))
        job = self.jobs[held.job.id]
        self.do(self.lab.expire_lease(held.job))
        assert self.do(self.queues[reaper].reclaim()) == 1
        state = State(self.do(self.lab.state(job.id)))
        assert state in (State.WAITING, State.FAILED, State.CANCELLED)
        assert (state is State.CANCELLED) is job.cancelled
        job.state = state

    @precondition(lambda self: any(self.is_current(held) for held in self.held))
    @rule(data=st.data(), heir=st.sampled_from(WORKERS), word=st.sampled_from(["emit", "finish"]))
    def zombie_speaks(self, data: Any, heir: str, word: str) -> None:
        """A lease ends, another worker (or the same) takes over, and the first one speaks again."""
        zombie = data.draw(st.sampled_from([one for one in self.held if self.is_current(one)]))
        self.lease_ends(data, heir, zombie)
        self.claim(heir, 50)
        if word == "emit":
            self.emit(data, count=1, lost_reply=False, held=zombie)
        else:
            self.finish(data, state="finished", held=zombie)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:
        """A worker lost the reply of its claim, reconnects, and releases what it does not know."""
        held = self.pick(data)
        current = self.is_current(held)
        known = [h.job.id for h in self.held if h.worker == held.worker and h is not held]
        if not current or held.job.id in known:
            return
        assert self.do(self.queues[held.worker].release_phantoms(known)) == {held.job.id}
        self.back(self.jobs[held.job.id])
        self.held.remove(held)

    # what must hold

    @invariant()
    def tenants_are_counted_right(self) -> None:
        for tenant in TENANTS:
            for state in (State.RUNNING, State.WAITING):
                found = self.do(self.lab.raw.smembers(self.lab.keys.tenant(tenant, state)))
                expected = self.ids(tenant, state) if self.limited(tenant) else set()
                assert {job_id.decode() for job_id in found} == expected

    @invariant()
    def redis_agrees(self) -> None:
        for job in self.jobs.values():
            fields = self.do(self.lab.fields(job.id))
            assert fields["state"] == job.state
            assert int(fields["attempt"]) == job.attempt
            assert int(fields["offset"]) == len(job.tokens)
            log = self.do(self.lab.log(job.id))
            assert [token for event in log for token in event.token_ids] == job.tokens
            offset = 0
            for event in log:
                assert event.offset == offset
                offset = event.end
            ends = [event.final for event in log]
            assert sum(ends) == job.state.terminal
            assert not any(ends[:-1])

    def teardown(self) -> None:
        """Everything that waits can still be claimed and finished: no job is lost."""
        if not hasattr(self, "lab"):
            return
        for tenant in self.limits:
            self.do(self.rules.remove_limits(tenant))
        self.make_due()
        left = {job.id for job in self.jobs.values() if job.state is State.WAITING}
        running = {job.id for job in self.jobs.values() if job.state is State.RUNNING}
        claimed = self.do(self.queues["w1"].claim(100))
        assert {job.id for job in claimed} == left
        for job in claimed:
            assert self.do(self.queues["w1"].finish(job, [], RESULT))
        assert self.do(self.lab.entries()) == len(running)
        assert self.do(self.lab.raw.zcard(self.lab.keys.live("m"))) == len(running)
        self.do(self.lab.aclose())

    def event(self, held: Held, offset: int) -> Event:
        self.token += 1
        text = f"{self.token} "
        return Event(offset=offset, token_ids=(self.token,), text=text, attempt=held.job.attempt)

    def ids(self, tenant: str, state: State, classes: tuple[str, ...] = PRIORITIES) -> set[str]:
        """The walk over jobs."""
        return {
            job.id
            for job in self.jobs.values()
            if (job.tenant, job.state) == (tenant, state) and job.priority in classes
        }

    def limited(self, tenant: str) -> TenantLimits | None:
        return self.limits.get(tenant) or self.limits.get(EVERY_OTHER)

    def room(self, tenant: str, state: State) -> int:
        limits = self.limited(tenant)
        most = None if limits is None else getattr(limits, state)
        return 1000 if most is None else max(0, most - len(self.ids(tenant, state)))

    def claimable(self, tenant: str, classes: tuple[str, ...] = PRIORITIES) -> int:
        waiting = self.ids(tenant, State.WAITING, classes)
        return min(len(waiting), self.room(tenant, State.RUNNING))

    def back(self, job: Modelled) -> None:
        job.state = State.CANCELLED if job.cancelled else State.WAITING

    def make_due(self) -> None:
        """Back-off times pass."""
        for job_id in self.do(self.lab.raw.zrange(self.lab.keys.delay, 0, -1)):
            self.do(self.lab.raw.zadd(self.lab.keys.delay, {job_id: 1}))


def test_any_order_of_moves_keeps_what_must_hold(make_lab):
    class Machine(QueueMachine):
        pass

    with asyncio.Runner() as runner:
        Machine.make_lab = staticmethod(make_lab)
        Machine.runner = runner
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=30,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize("state", [state for state in State if state.terminal])
def test_no_move_leads_out_of_a_terminal_state(state):
    assert MOVES[state] == frozenset()
    assert all(state in MOVES[start] for start in (State.RUNNING,))
