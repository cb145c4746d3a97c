"""What a worker is made of: each part, with those that it needs.

Here is the order in which they are made; what they do and when is the service's (service.py).

Invariant: nothing here waits, starts a task, or speaks to Redis.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenfleet.producer.connection import Connection
from tokenfleet.worker.broker import Broker
from tokenfleet.worker.control import Control
from tokenfleet.worker.dispatch import Dispatcher
from tokenfleet.worker.engine_link.engine_host import EngineHost
from tokenfleet.worker.engine_link.engine_process import EngineHandle, EngineInfo
from tokenfleet.worker.intake import Intake
from tokenfleet.worker.lease import LeaseKeeper
from tokenfleet.worker.observing.queue_watch import QueueWatch
from tokenfleet.worker.observing.telemetry import Telemetry
from tokenfleet.worker.preemption import Seats
from tokenfleet.worker.prepare import Preparer
from tokenfleet.worker.presence import Pace, Presence
from tokenfleet.worker.publisher import Publisher
from tokenfleet.worker.queue import JobQueue
from tokenfleet.worker.readiness import Readiness, Signs
from tokenfleet.worker.reaper import Reaper
from tokenfleet.worker.roster import Roster
from tokenfleet.worker.settings import WorkerSettings

CONNECT_TIMEOUT_S = 10.0


class Parts:
    """The parts of one worker.

    Args:
        settings: valid ones (settings.py: load_settings).
        make_engine: a handle for each new engine process.
        drain: take no more jobs and end; called again: at once.
        draining: whether it has been called.
        on_ready: called when an engine can take requests.
        on_registered: called once, when the worker is in the worker table.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        telemetry: Telemetry,
        *,
        worker_id: str,
        make_engine: Callable[[], EngineHandle],
        drain: Callable[[], None],
        draining: Callable[[], bool],
        on_ready: Callable[[EngineInfo], None],
        on_registered: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._draining = draining
        self._reach_redis(worker_id)
        self._wire_jobs(make_engine, on_ready)
        self._wire_upkeep()
        self._wire_faces(worker_id, drain, on_registered)

    def _reach_redis(self, worker_id: str) -> None:
        settings = self._settings
        self.connection = Connection(
            settings.redis_url,
            namespace=settings.namespace,
            partitions=settings.partitions,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        self.broker = Broker(several=self.connection.cluster)
        self.queue = JobQueue(
            self.connection,
            namespace=settings.namespace,
            model_name=settings.served_name,
            worker_id=worker_id,
            lease_s=settings.lease_s,
            max_failures=settings.max_failures,
            log_ttl_s=settings.log_ttl_s,
            result_ttl_s=settings.result_ttl_s,
        )

    def _wire_jobs(
        self, make_engine: Callable[[], EngineHandle], on_ready: Callable[[EngineInfo], None]
    ) -> None:
        """The way of a job."""
        settings = self._settings
        self.roster = Roster(settings.max_num_seqs, settings.prefetch)
        self.preparer = Preparer()
        self.dispatcher = Dispatcher(
            self.queue,
            self.broker,
            self.roster,
            self.preparer,
            self._telemetry,
            lease_s=settings.lease_s,
            step_tokens=settings.max_num_batched_tokens,
        )
        self.publisher = Publisher(
            self.queue,
            self.broker,
            self.dispatcher,
            flush_interval_s=settings.flush_interval_ms / 1000,
            flushed=self._telemetry.flushed,
        )
        self.dispatcher.connect(self.publisher)
        self.intake = Intake(
            self.queue,
            self.broker,
            self.roster,
            self.dispatcher,
            Seats(settings.max_num_seqs, settings.max_preemptions),
        )
        self.host = EngineHost(
            make_engine,
            self.dispatcher,
            self.roster,
            self._telemetry,
            step_limit_s=settings.step_limit_s,
            start_limit_s=settings.engine_start_timeout_s,
            on_ready=on_ready,
        )

    def _wire_upkeep(self) -> None:
        """What runs beside it."""
        settings = self._settings
        self.leases = LeaseKeeper(
            self.queue,
            self.broker,
            self.roster,
            self.dispatcher,
            lease_s=settings.lease_s,
            healthy=lambda: self.host.ready,
        )
        self.reaper = Reaper(
            self.queue,
            self.broker,
            lease_s=settings.lease_s,
            reclaimed=self._telemetry.jobs_reclaimed,
        )
        self.watch = QueueWatch(self.queue, self.connection, self.broker, self._telemetry)

    def _wire_faces(
        self, worker_id: str, drain: Callable[[], None], on_registered: Callable[[], None]
    ) -> None:
        """What others see of the worker, and say to it."""
        self._telemetry.watch(
            ready=lambda: not self.not_ready(), broker=lambda: self.broker.reachable
        )
        self._pace = Pace(lambda: self._telemetry.last_step)
        self.presence = Presence(
            self.queue, self.broker, about=self._about, on_registered=on_registered
        )
        self._readiness = Readiness(self._signs, step_limit_s=self._settings.step_limit_s)
        self.control = Control(
            self.connection,
            self.broker,
            self.roster,
            self.dispatcher,
            worker_id=worker_id,
            drain=drain,
        )

    def not_ready(self) -> list[str]:
        """Why this worker would not take a job now; empty when it would."""
        return self._readiness.reasons()

    def _signs(self) -> Signs:
        return Signs(
            draining=self._draining(),
            engine_ready=self.host.ready,
            working_since=self.dispatcher.launcher.working_since,
            last_heard=self.host.last_heard,
            reachable=self.broker.reachable,
            last_script=self.presence.last_written,
            last_claim=self.intake.last_claim,
            room=self.roster.room(),
        )

    def _about(self) -> dict[str, str | int | float]:
        return {
            "slots": self.roster.slots,
            "running": self.roster.running,
            "owned": len(self.roster),
            "engine": "ready" if self.host.ready else "starting",
            "draining": int(self._draining()),
            **self._pace.figures(),
        }
