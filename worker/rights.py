"""What an ACL user needs to be a worker, and to look at a fleet; see producer/rights.py.

Invariant: a worker without more than these rights starts, serves, hands over and leaves.
"""

from __future__ import annotations

from tokenfleet.producer.rights import (
    CLUSTER,
    EVERYBODY,
    PRODUCER_SCRIPTS,
    SUBSCRIBER,
    called_by,
    rules,
)

WORKER_SCRIPTS = "tokenfleet.worker.lua"
OWN_WORKER = ("xread", "xreadgroup", "xlen", "xpending", "xgroup|create", "xgroup|delconsumer")
OPERATOR = (
    *("scan", "xinfo|groups", "xinfo|consumers", "xinfo|stream", "xrange", "xlen", "xpending"),
    *("zrange", "zrevrange", "zscore", "zcard", "zcount", "hget", "hgetall", "hmget", "time"),
    *("config|get", "info", "acl|whoami", "client|list"),
    *("hexists", "del"),  # a tenant's limits set and taken away, dead letters dropped
    "xgroup|create",  # queues ensured
)
"""What `tokenfleet queue`, `dead`, `top` and `doctor` do, on top of what a client may."""


def worker_rules(namespace: str) -> list[str]:
    """The rights of a worker."""
    scripts = called_by(WORKER_SCRIPTS, PRODUCER_SCRIPTS)  # what stands in front of each
    return rules(namespace, {*EVERYBODY, *SUBSCRIBER, *CLUSTER, *OWN_WORKER, *scripts})


def operator_rules(namespace: str) -> list[str]:
    """The rights of whoever looks at the fleet and replays dead letters."""
    commands = {*EVERYBODY, *SUBSCRIBER, *CLUSTER, *OPERATOR, *called_by(PRODUCER_SCRIPTS)}
    return rules(namespace, commands)
