"""Where jobs, engine and publisher meet: what is claimed is launched, what is made is handed on.

Every job that enters by `take` leaves by `leave`, once: ended, lost, or handed back. What has to
wait for Redis is in handback.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence

import structlog

from tokenfleet.producer.protocol import EventError, JobResult
from tokenfleet.worker.broker import Broker
from tokenfleet.worker.engine_link.engine_process import Batch, StepEvent
from tokenfleet.worker.handback import HandBack
from tokenfleet.worker.jobs import Ending, Job, Stage
from tokenfleet.worker.launcher import Launcher
from tokenfleet.worker.observing.telemetry import Telemetry
from tokenfleet.worker.prepare import BadJob, Preparer, is_short
from tokenfleet.worker.publisher import Publisher
from tokenfleet.worker.queue import ClaimedJob, JobQueue
from tokenfleet.worker.roster import Roster

_HELD = (Stage.CLAIMED, Stage.READY, Stage.RUNNING)
"""Stages of a job that this worker works on."""

Heard = tuple[Job, StepEvent]
"""What the engine said, and of which job."""

log = structlog.get_logger()


class Dispatcher:
    """Moves jobs between queue, engine and publisher, on one event loop.

    Args:
        lease_s: what a claim grants.
        step_tokens: prompt tokens that fill a step of the engine.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        queue: JobQueue,
        broker: Broker,
        roster: Roster,
        preparer: Preparer,
        telemetry: Telemetry,
        *,
        lease_s: float,
        step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._broker = broker
        self._roster = roster
        self._preparer = preparer
        self._telemetry = telemetry
        self._lease_s = lease_s
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._publisher: Publisher
        self._hand_back: HandBack
        self.launcher = Launcher(roster, step_tokens=step_tokens, clock=clock)

    def connect(self, publisher: Publisher) -> None:
        """Who publishes for this dispatcher, and reports to it; to be called once, first."""
        self._publisher = publisher
        self._hand_back = HandBack(self._queue, self._broker, publisher, self, clock=self._clock)

    # jobs come in

    def take(self, claimed: Iterable[ClaimedJob], asked_at: float, *, more: bool = False) -> None:
        """Own what a claim brought.

        Args:
            asked_at: monotonic time before the claim: the lease is counted from it.
            more: another claim follows at once, and may bring more.
        """
        self.launcher.others_follow = more
        jobs = [self._own(one, asked_at) for one in claimed]
        refused = []
        tokens = 0
        for job in jobs:
            if not is_short(job.claimed):
                self._spawn(self._prepare(job))
            elif error := self._prepare_here(job):
                refused.append((job, error))
            else:
                tokens += len(job.request.prompt_token_ids)
                self.launcher.at_once(tokens)
        self.launcher.ready()
        for job in jobs:  # whoever waits for a first token does not wait for this
            self._tell_of_claim(job)
        for job, error in refused:
            self._not_prepared(job, error)

    def _own(self, one: ClaimedJob, asked_at: float) -> Job:
        if older := self._roster.get(one.id):
            self.lost(older, "claimed again")
        job = Job(one, self._clock())
        job.lease_until = asked_at + self._lease_s
        self._roster.add(job)
        return job

    def _tell_of_claim(self, job: Job) -> None:
        one = job.claimed
        self._telemetry.job_claimed(one, job.claimed_at)
        log.info(
            "job_claimed", job_id=one.id, attempt=one.attempt, offset=one.offset,
            failures=one.failures,
        )  # fmt: skip

    def _prepare_here(self, job: Job) -> Exception | None:
        """Returns what was wrong."""
        try:
            self._preparer.prepare_here(job)
        except Exception as error:  # noqa: BLE001 - no reason to end the other jobs
            return error
        self._prepared(job)
        return None

    async def _prepare(self, job: Job) -> None:
        try:
            await self._preparer.prepare(job)
        except Exception as error:  # noqa: BLE001 - the same
            self._not_prepared(job, error)
        else:
            self._prepared(job)
            self.launcher.soon()

    def _not_prepared(self, job: Job, error: Exception) -> None:
        if isinstance(error, BadJob):
            self._fail(job, error.code, str(error))
        else:
            self._fail_of_ours(job, error)

    def _prepared(self, job: Job) -> None:
        if job.stage is Stage.ENDED:
            self._publish(job)
        elif job.stage is Stage.READY:
            self._arm_deadline(job)

    # the engine speaks

    async def heard(self, batch: Batch) -> None:
        """Act on what the engine said. One batch at a time.

        First tokens come first: they are on their way to Redis while the other tokens, of which a
        step makes many, are turned into text.
        """
        first, others = self._by_haste(batch.events)
        freed = self._heard_events(first)
        if first and others:
            await asyncio.sleep(0)  # the publisher writes,
            await asyncio.sleep(0)  # and the loop sends it
        freed = self._heard_events(others) or freed
        for refusal in batch.refusals:
            if job := self._roster.by_engine_id(refusal.id):
                self._fail(job, refusal.code, refusal.message)
                freed = True
        if batch.stats is not None:
            self._telemetry.step(batch.stats)
        for engine_id in batch.preempted:
            if job := self._roster.by_engine_id(engine_id):
                self._telemetry.preempted(job.origin)
        if freed:
            self.launcher.now()
            self._roster.touch()
        self.launcher.heard()

    def _by_haste(self, events: Iterable[StepEvent]) -> tuple[list[Heard], list[Heard]]:
        """Events of jobs that have made no token yet, and the others; those of nobody's are left
        out."""
        first: list[Heard] = []
        others: list[Heard] = []
        for event in events:
            job = self._roster.by_engine_id(event.id)
            if job is not None:
                (first if job.first_token_at is None else others).append((job, event))
        return first, others

    def _heard_events(self, events: Iterable[Heard]) -> bool:
        freed = False
        for job, event in events:
            if job.stage is Stage.RUNNING and self._heard_event(job, event):
                freed = True
        return freed

    def _heard_event(self, job: Job, event: StepEvent) -> bool:
        """Returns whether a slot may have come free or a suspect is cleared."""
        first = job.first_token_at is None
        try:
            stopped = job.apply(event)
        except Exception as error:  # noqa: BLE001 - the same
            self._fail_of_ours(job, error)
            return True
        if stopped:
            self.launcher.abort_choice(job, event.choice)
        first = first and job.first_token_at is not None
        if first:
            self._telemetry.first_token(job.origin)
        self._publisher.touch(job, urgent=first)
        return event.finish_reason is not None or job.ending is not None or first

    # ways out

    def cancel(self, job: Job) -> None:
        """A producer wants the job to end."""
        self._end(job, Ending("cancelled"))

    def expire(self, job: Job) -> None:
        """The job's deadline has passed."""
        self._end(job, Ending("expired"))

    def ended(self, job: Job) -> None:
        """The job's end is in Redis."""
        assert job.ending is not None
        result = job.result() if job.choices else None
        self.leave(job, job.ending.state, result)

    def fenced(self, job: Job) -> None:
        """Redis does not know the job as ours: it is another's, or Redis has forgotten it."""
        if job.adoptable and job.lease_until > self._clock():  # else it may have ended elsewhere
            job.suspended = True
            self._spawn(self._adopt(job))
        elif not job.suspended:
            self.lost(job, "fenced")

    async def _adopt(self, job: Job) -> None:
        asked_at = self._clock()
        again = await self._hand_back.offer(job)
        if again is None:
            if self._roster.get(job.id) is job:
                self.lost(job, "fenced")
            return
        log.warning("job_adopted", job_id=job.id, attempt=again.attempt, offset=again.offset)
        job.lease_until = asked_at + self._lease_s
        job.adopted(again)
        self._publish(job, urgent=True)

    def out_of_step(self, job: Job) -> None:
        """Redis has lost events that it had: whoever is next goes on from what is left."""
        job.suspended = True
        if job.stage is not Stage.ENDED:
            self._take_away(job)
        self._spawn(self._hand_back.give_up_end(job, "the log is shorter than it was"))

    def lost(self, job: Job, reason: str) -> None:
        """The job is another's, or may be: stop it and say nothing more in its name."""
        log.warning("job_lost", job_id=job.id, attempt=job.claimed.attempt, reason=reason)
        self.launcher.abort(job)
        self.leave(job, "lost")

    async def hand_back(self, jobs: Sequence[Job], why: str, *, engine_died: bool = False) -> None:
        """Give jobs that have not ended back to the queue, with all their tokens logged.

        Args:
            engine_died: count a failure against those that the engine had begun.
        """
        waiting = self.waiting_in_engine()
        left = [job for job in jobs if job.stage in _HELD]
        begun = [j for j in left if j.stage is Stage.RUNNING and j not in waiting]
        blamed = begun if engine_died else []
        for job in left:
            self._take_away(job)
        await self._hand_back.give(blamed, [j for j in left if j not in blamed], why)

    def make_way(self, jobs: Sequence[Job]) -> None:
        """Put jobs back for more urgent ones that wait in the engine for their slots."""
        for job in jobs:
            self._telemetry.preempted(job.origin)
            self._take_away(job)
        self._spawn(self._hand_back.give([], jobs, "preempted", preempted=True))

    async def swap(self, victims: Sequence[Job]) -> list[ClaimedJob]:
        """Claim more urgent jobs in the places of `victims`; returns them, to be taken."""
        return await self._hand_back.swap(victims)

    def put_back(self, job: Job) -> None:
        """A more urgent job has this one's place: it waits in Redis again, whatever was done to it
        here while that was decided."""
        if job.stage is Stage.GONE:
            return
        log.info(
            "job_released", job_id=job.id, attempt=job.claimed.attempt, offset=job.logged,
            reason="preempted",
        )  # fmt: skip
        self._telemetry.preempted(job.origin)
        if job.stage is not Stage.ENDED:
            self._take_away(job)
        self.leave(job, "released")

    def waiting_in_engine(self) -> list[Job]:
        """Jobs given to the engine that it cannot have begun: the youngest beyond its slots."""
        excess, found = -self._roster.free_slots, []
        for job in reversed(list(self._roster)):
            if excess <= 0:
                break
            if job.stage is Stage.RUNNING and job.first_token_at is None:
                found.append(job)
            if job.stage in (Stage.CLAIMED, Stage.READY) or job in found:
                excess -= job.slots
        return found

    async def close(self) -> None:
        """Stop preparing."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._preparer.close()

    def _fail(self, job: Job, code: str, message: str) -> None:
        log.info("job_refused", job_id=job.id, attempt=job.claimed.attempt, code=code)
        self._end(job, Ending("failed", EventError(code, message)))

    def _fail_of_ours(self, job: Job, error: Exception) -> None:
        log.error("job_broke_worker_code", job_id=job.id, exc_info=error)
        self._fail(job, "internal_error", f"{type(error).__name__} in the worker; see its log")

    def _end(self, job: Job, ending: Ending) -> None:
        if job.stage in (Stage.ENDED, Stage.GONE):
            return
        self.launcher.abort(job)
        job.end(ending)
        self._publish(job)
        self.launcher.now()
        self._roster.touch()

    def leave(self, job: Job, state: str, result: JobResult | None = None) -> None:
        """The job is not this worker's any more; said twice, it counts once."""
        if job.stage is Stage.GONE:
            return
        if job.timer is not None:
            job.timer.cancel()
        self._roster.remove(job)
        self._telemetry.job_ended(job.origin, state, result)
        if state not in ("lost", "released"):
            log.info("job_ended", job_id=job.id, attempt=job.claimed.attempt, state=state)

    def _publish(self, job: Job, *, urgent: bool = False) -> None:
        self._publisher.touch(job, urgent=urgent)

    def _take_away(self, job: Job) -> None:
        """Stop a job that has not ended, and hear nothing more of it."""
        self.launcher.abort(job)
        if job.stage is not Stage.LEAVING:
            job.move(Stage.LEAVING)

    def _arm_deadline(self, job: Job) -> None:
        if job.deadline_at is not None:
            left = max(0.0, job.deadline_at - self._clock())
            job.timer = asyncio.get_running_loop().call_later(left, self.expire, job)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
