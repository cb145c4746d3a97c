"""The names of everything in Redis. No other module spells a key.

Every key of a job starts with the hash tag `{namespace:p}`, so all that one script touches lies in
one cluster slot. A job id is `<uuid7>.<p>`: whoever has the id finds the keys without a look-up.

Invariant: two different things never share a name (tenants and namespaces hold no colon or brace).
"""

from __future__ import annotations

import os
import re
import time
import zlib
from dataclasses import dataclass, field
from functools import lru_cache

from tokenfleet.producer.errors import InvalidJob

GROUP = "workers"
"""The consumer group on every queue."""

PRIORITIES = ("interactive", "default", "batch")
"""The classes of jobs, most urgent first."""

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_JOB_ID = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\.(0|[1-9]\d{0,4})"
)


def new_job_id(partition: int) -> str:
    """A fresh `<uuid7>.<p>`: time-ordered, made without asking Redis."""
    return derived_job_id(partition, time.time_ns() // 1_000_000, os.urandom(10))


def derived_job_id(partition: int, created_ms: int, entropy: bytes) -> str:
    """The `<uuid7>.<p>` of a time and ten bytes: whoever knows them finds the job again."""
    value = created_ms << 80 | int.from_bytes(entropy)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}.{partition}"


def partition_of(job_id: str) -> int:
    """The partition in a job id. Raises InvalidJob for anything that is no job id."""
    match = _JOB_ID.fullmatch(job_id) if isinstance(job_id, str) else None
    if match is None:
        raise InvalidJob("job id", job_id, "must be one that submit returned: <uuid7>.<partition>")
    return int(match[1])


def partition_for_key(tenant: str, idempotency_key: str, partitions: int) -> int:
    """Where a job with an idempotency key lives: the same place for every client."""
    return zlib.crc32(f"{tenant}:{idempotency_key}".encode()) % partitions


def check_name(field: str, value: object) -> str:
    """A namespace, tenant or worker id that can stand in a key."""
    if not isinstance(value, str) or not _is_name(value):
        raise InvalidJob(field, value, "must be 1 to 64 letters, digits, '_', '.' or '-'")
    return value


def check_model(value: object) -> str:
    """The name of a model, which stands in keys too."""
    if not isinstance(value, str) or not 1 <= len(value) <= 256 or not value.isprintable():
        raise InvalidJob("model", value, "must be the name of a model, 1 to 256 characters")
    return value


@lru_cache(1024)  # the same few names come with every job
def _is_name(value: str) -> bool:
    return NAME.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one partition."""

    namespace: str
    partition: int

    prefix: str = field(init=False)
    """`{namespace:p}`, with the braces: the hash tag."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"{{{self.namespace}:{self.partition}}}")

    def queue(self, model: str, priority: str) -> str:
        """Stream of waiting jobs, field `j` the job id."""
        return f"{self.prefix}:q:{model}:{priority}"

    def front(self, model: str, priority: str) -> str:
        """Stream of released and reclaimed jobs of that class, read before `queue`."""
        return f"{self.prefix}:q:{model}:{priority}:front"

    def streams(self, model: str) -> list[str]:
        """All streams of a model, the most urgent class first, each `front` before its `queue`."""
        return [
            key
            for priority in PRIORITIES
            for key in (self.front(model, priority), self.queue(model, priority))
        ]

    def job(self, job_id: str) -> str:
        """Hash: the job. The authority over everything else."""
        return f"{self.prefix}:j:{job_id}"

    def events(self, job_id: str) -> str:
        """Stream: the event log; and the channel that announces it."""
        return f"{self.prefix}:e:{job_id}"

    @property
    def delay(self) -> str:
        """Sorted set: jobs that may not be claimed yet, by due time."""
        return f"{self.prefix}:delay"

    @property
    def deadline(self) -> str:
        """Sorted set: jobs with a deadline that have not ended, by deadline."""
        return f"{self.prefix}:deadline"

    @property
    def dead(self) -> str:
        """Sorted set: dead-lettered jobs, by time."""
        return f"{self.prefix}:dead"

    def live(self, model: str) -> str:
        """Sorted set: a model's jobs that have not ended, by since when they may run.

        Its size up to now is what the model's workers have to do: the scaling signal.
        """
        return f"{self.prefix}:live:{model}"

    def bell(self, model: str) -> str:
        """Stream of one entry, a new one when a job becomes claimable without entering a queue."""
        return f"{self.prefix}:bell:{model}"

    @property
    def paused(self) -> str:
        """Set: `<model>:<priority>` of the queues that nobody claims from."""
        return f"{self.prefix}:paused"

    @property
    def limits(self) -> str:
        """Hash: tenant (`*`: all others) to `<most running> <most waiting>`, empty: no limit."""
        return f"{self.prefix}:limits"

    def tenant(self, tenant: str, what: str) -> str:
        """What is kept of a tenant with limits: `running` and `waiting` (sets of job ids), ..."""
        return f"{self.prefix}:tenant:{tenant}:{what}"

    def tenant_backlog(self, tenant: str, model: str, priority: str) -> str:
        """Sorted set: jobs of a tenant with limits that wait for their turn, by submission time."""
        return self.tenant(tenant, f"q:{model}:{priority}")

    def backlogs(self, model: str, priority: str) -> str:
        """Set: the tenants that have such a backlog."""
        return f"{self.prefix}:backlogs:{model}:{priority}"

    def idempotency(self, tenant: str, key: str) -> str:
        """String: `<job id> <payload digest>`."""
        return f"{self.prefix}:idem:{tenant}:{key}"

    @property
    def workers(self) -> str:
        """Sorted set: worker ids by when they were last seen."""
        return f"{self.prefix}:workers"

    def worker(self, worker_id: str) -> str:
        """Hash: what a worker says of itself; gone a while after the worker."""
        return f"{self.prefix}:worker:{worker_id}"

    def standing(self, worker_id: str) -> str:
        """String: which claim of a worker that waits for jobs at the server may take some."""
        return f"{self.prefix}:standing:{worker_id}"

    def control(self, worker_id: str) -> str:
        """Channel: `cancel <job id> <attempt>` and `drain`."""
        return f"{self.prefix}:ctl:{worker_id}"


def keys_of(namespace: str, job_id: str) -> Keys:
    """The keys of the partition that a job lives in."""
    return Keys(namespace, partition_of(job_id))
