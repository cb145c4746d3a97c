"""A worker's side of the queue: one method per script, and the order in which classes are served.

The job's hash is the authority: every script checks state and attempt there first. The lease clock
is the idle time of the job's entry in the consumer group: a claim sets it for free, renewing costs
one XCLAIM, and no further key has to be kept in step. How long the lease is stands in the hash, so
that workers with different leases reclaim each other's jobs at the right time.

Invariant: nothing here changes a job whose attempt is not the one it was claimed with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from tokenfleet.producer.connection import Broker, Connection
from tokenfleet.producer.keys import PRIORITIES, check_model, check_name
from tokenfleet.producer.protocol import EventError, JobResult, State
from tokenfleet.worker.claims import (
    ClaimedJob,
    Emission,
    EmitOutcome,
    Entries,
    LogBehind,
    Terms,
    text,
    together,
)
from tokenfleet.worker.groups import HEARTBEAT, Groups
from tokenfleet.worker.holding import FAIL, RELEASE, RENEW, Holding
from tokenfleet.worker.job_log import ADOPT, EMIT, FINISH, JobLog
from tokenfleet.worker.partitions import PartitionSilent, Silences, look
from tokenfleet.worker.priorities import ClassOrder
from tokenfleet.worker.rescue import PHANTOMS, RECLAIM, REPAIR, Rescue
from tokenfleet.worker.standing import Standing
from tokenfleet.worker.swapping import Hold, unheld
from tokenfleet.worker.taker import CLAIM, PEEK, SWAP, Taker

__all__ = ["ClaimedJob", "Emission", "EmitOutcome", "Entries", "JobQueue", "LogBehind"]

_SCRIPTS = (
    *(CLAIM, SWAP, PEEK, EMIT, FINISH, ADOPT, RENEW, RELEASE, FAIL),
    *(RECLAIM, PHANTOMS, REPAIR, HEARTBEAT),
)
"""What a worker that serves will run, sooner or later."""


class JobQueue:
    """The queues of one model, for one worker.

    Calls raise BrokerUnavailable when Redis does not answer; all but `claim` and `swap` may be
    repeated then.
    """

    def __init__(
        self,
        broker: Broker | Connection,
        *,
        namespace: str,
        model_name: str,
        worker_id: str,
        lease_s: float = 30.0,
        max_failures: int = 3,
        log_ttl_s: float = 600.0,
        result_ttl_s: float = 3600.0,
        partitions: int | None = None,
        order: ClassOrder | None = None,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._owns = not isinstance(broker, Connection)
        self._connection = (
            broker
            if isinstance(broker, Connection)
            else Connection(broker, namespace=namespace, partitions=partitions)
        )
        self.worker_id = check_name("worker_id", worker_id)
        self.model_name = check_model(model_name)
        self._terms = Terms(
            worker_id=worker_id,
            model_name=model_name,
            lease_ms=int(lease_s * 1000),
            max_failures=max_failures,
            result_ttl_ms=int(result_ttl_s * 1000),
            log_ttl_ms=int(log_ttl_s * 1000),
        )
        self._groups = Groups(self._connection)
        self._first_partition = 0
        self._log = JobLog(self._connection, self._terms)
        self._holding = Holding(self._connection, self._terms, uniform)
        self._rescue = Rescue(self._connection, self._terms)
        self._silences = Silences()
        self._taker = Taker(
            self._connection,
            self._terms,
            order=order or ClassOrder(),
            silences=self._silences,
            bury=self._holding.bury,
            put_back=self._holding.put_back_in,
            regrouped=self._rescue.restart_repair,
        )

    @property
    def connection(self) -> Connection:
        """For the control channel and other business of the same worker."""
        return self._connection

    async def ensure(self) -> list[str]:
        """Redis is usable by a worker, and the groups exist. Returns warnings about how it is set
        up."""
        await self._connection.ready()
        await together([self._check_allowed(partition) for partition in self._partitions()])
        return await self.ensure_groups()

    async def ensure_groups(self) -> list[str]:
        """The same for an operator, who may not do what a worker may."""
        await self._connection.ready()
        problems = await self._groups.ensure(self._all_streams())
        return problems + await self._groups.policy_warnings()

    async def _check_allowed(self, partition: int) -> None:
        workers = self._connection.keys(partition).workers
        await self._connection.check_allowed(_SCRIPTS, partition, workers)

    async def claim(self, count: int) -> list[ClaimedJob]:
        """Take up to `count` waiting jobs. Never repeated; a lost reply leaves phantoms.

        Raises BrokerUnavailable only when nothing was claimed: what came before the connection
        broke is returned.
        """
        partitions = self._partitions()
        self._first_partition = (self._first_partition + 1) % self._connection.partitions
        return await self._taker.claim(count, partitions)

    async def swap(
        self, victims: Sequence[ClaimedJob], hold: Hold = unheld
    ) -> tuple[list[ClaimedJob], frozenset[str]]:
        """Take jobs of more urgent classes, each in the place of one of `victims`.

        The victims, first ones first, go back to the front of their class; within `hold` what they
        have made is logged. Returns the jobs taken and the ids put back. Never repeated, as claim.
        """
        return await self._taker.swap(victims, self._partitions(), hold)

    @property
    def cut_short(self) -> bool:
        """Whether the last claim or swap may have taken more than it brought."""
        return self._taker.cut_short

    async def wait(self, timeout_s: float) -> bool:
        """Return when a job may be there, or the time is over. Claims nothing."""
        return await self._taker.wait(timeout_s)

    def stand(self, count: int, timeout_s: float) -> Standing | None:
        """A claim that waits at the server for a job; None where `wait` and `claim` must do. Made,
        it is waited for or withdrawn before anything else is claimed."""
        return self._taker.stand(count, timeout_s)

    async def wait_urgent(self, timeout_s: float) -> bool:
        """Return when there may be something to swap for, or the time is over."""
        return await self._taker.wait_urgent(timeout_s)

    async def renew(self, jobs: Iterable[ClaimedJob]) -> frozenset[str]:
        """Extend the leases. Returns the ids that are not this worker's any more."""
        return await self._holding.renew(jobs)

    async def emit(self, emissions: list[Emission]) -> EmitOutcome:
        """Log and announce; one call per partition. Repeating it does no harm."""
        return await self._log.emit(emissions)

    async def finish(
        self,
        job: ClaimedJob,
        entries: Entries,
        result: JobResult | None,
        *,
        state: str = "finished",
        error: EventError | None = None,
    ) -> bool:
        """The job's end, behind its last events. True: it is in Redis; False: fenced.

        `cancelled` becomes `expired` where nobody asked to cancel and the deadline has passed.
        Raises LogBehind when the log does not reach the first event.
        """
        return await self._log.finish(job, entries, result, state=State(state), error=error)

    async def release(
        self, jobs: Iterable[ClaimedJob], reason: str, *, preempted: bool = False
    ) -> frozenset[str]:
        """Hand jobs back unharmed, to the front of their class. Returns the ids handed back.

        `reason` is for the caller's log; the job does not keep it. `preempted`: they make way for
        more urgent ones, which the job counts.
        """
        return await self._holding.release(jobs, preempted=preempted)

    async def fail(
        self, job: ClaimedJob, code: str, message: str, *, retryable: bool
    ) -> State | None:
        """An attempt went wrong. Returns the job's state now; None: it is another attempt's.

        Retryable: the job waits out its back-off, or is dead-lettered when its failures are used
        up; one that was to be cancelled, or whose deadline has passed, ends so. Not retryable: it
        has failed.
        """
        return await self._holding.fail(job.id, job.attempt, code, message, retryable=retryable)

    async def adopt(self, job: ClaimedJob, entries: Entries) -> ClaimedJob | None:
        """Give Redis back a job that it has forgotten while it ran here (FLUSHALL).

        `entries`: all that had been logged, as it was logged. Returns the job under its new
        attempt, to go on with (`logged` stays what the claim brought); None when Redis knows the
        job: it is another's then.
        """
        return await self._log.adopt(job, entries)

    async def reclaim(self, limit: int = 100) -> int:
        """Move on jobs whose lease or deadline is over, in all classes. Returns how many."""
        return sum(await together([self._rescue.reclaim(p, limit) for p in self._partitions()]))

    async def repair(self, partition: int = 0, count: int = 100) -> int:
        """Look at the next `count` live jobs; those that lost their queue entry get a new one."""
        return await self._rescue.repair(partition, count)

    async def release_phantoms(self, known_ids: Collection[str]) -> frozenset[str]:
        """Release what this worker holds and does not know. No claim may be in flight.

        A partition that says nothing is waited for no longer than in a look. Raises once the others
        have answered, so that it is asked again.
        """
        asked = self._silences.asked(self._partitions())
        release = partial(self._rescue.release_phantoms, known_ids=known_ids)
        released, unseen = await look(release, asked, self._silences)
        for error in unseen.values():
            raise error
        if len(asked) < self._connection.partitions:
            raise PartitionSilent("a partition that was silent is not asked again yet")
        return frozenset().union(*released.values())

    async def backlog(self) -> dict[str, int]:
        """Jobs waiting to be claimed, per class, `:front` included; running ones not counted."""
        found = await together([self._backlog_in(p) for p in self._partitions()])
        return {name: sum(counts[name] for counts in found) for name in PRIORITIES}

    async def _backlog_in(self, partition: int) -> dict[str, int]:
        names, model = self._connection.keys(partition), self.model_name
        return {
            priority: await self._groups.waiting(
                [names.front(model, priority), names.queue(model, priority)]
            )
            + await self._held_back(partition, priority)
            for priority in PRIORITIES
        }

    async def _held_back(self, partition: int, priority: str) -> int:
        """Jobs in the backlogs of tenants with limits."""
        names, total = self._connection.keys(partition), 0
        backlogs = names.backlogs(self.model_name, priority)
        for tenant in await self._connection.execute("SMEMBERS", backlogs):
            backlog = names.tenant_backlog(text(tenant), self.model_name, priority)
            total += int(await self._connection.execute("ZCARD", backlog))
        return total

    async def heartbeat(self, info: Mapping[str, str | int | float], *, ttl_s: float = 15.0) -> int:
        """Show this worker in the worker table for `ttl_s`. Returns the server's time in ms.

        Raises WorkerIdTaken where `info` begins with an incarnation and another has the line.
        """
        line = {**info, "model": self.model_name}
        return await self._groups.heartbeat(self.worker_id, line, ttl_ms=int(ttl_s * 1000))

    async def take_over(self) -> None:
        """Take away the line that a worker which has ended left under this one's id."""
        await self._groups.heartbeat(self.worker_id, {}, ttl_ms=0)

    async def leave(self) -> None:
        """Leave the worker table, and the groups in which no job is held."""
        await self._groups.heartbeat(self.worker_id, {}, ttl_ms=0)
        await self._groups.leave(self._all_streams(), self.worker_id)

    async def aclose(self) -> None:
        """Stop waiting; close the connection unless it was handed in."""
        await self._taker.aclose()
        if self._owns:
            await self._connection.aclose()

    def _partitions(self) -> list[int]:
        """All partitions, beginning with another one after each claim."""
        first, total = self._first_partition, self._connection.partitions
        return [(first + step) % total for step in range(total)]

    def _all_streams(self) -> list[str]:
        return [key for partition in self._partitions() for key in self._streams(partition)]

    def _streams(self, partition: int) -> list[str]:
        return self._connection.keys(partition).streams(self.model_name)
