"""What an ACL user needs: the least rights of each role, read off the scripts and the code.

A user with exactly these rights passes the whole life of jobs (a test holds that), and can neither
touch another namespace nor read the server's settings.

Invariant: a command that a script calls is in its role's rights; nobody keeps a second list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files

from tokenfleet.producer.keys import check_name

_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'(?:, *'([A-Z]+)')?")
_WITH_SUBCOMMANDS = frozenset({"PUBSUB", "XGROUP", "XINFO"})
_HIDDEN = ("publish", "spublish", "pubsub|numsub", "pubsub|shardnumsub")
"""What scripts call under a name that is chosen while they run."""

EVERYBODY = ("select", "ping", "evalsha", "eval", "exists", "type")
SUBSCRIBER = ("subscribe", "unsubscribe", "ssubscribe", "sunsubscribe")
CLUSTER = ("cluster|slots", "cluster|shards", "cluster|myid", "command", "asking")
OWN_PRODUCER = ("hmget",)
LOOKING = (
    *("scan", "time", "hmget", "hgetall", "smembers", "sismember", "zrange", "zcard"),
    *("xinfo|groups", "xlen", "xpending", "xrange"),
)
"""What fleet.py asks for: the gateway's models and its status page."""
PRODUCER_SCRIPTS = "tokenfleet.producer.lua"


def called_by(*packages: str) -> set[str]:
    """The commands that the scripts of these packages may call, as ACL rules name them."""
    found = set(_HIDDEN)
    texts = [
        script.read_text()
        for package in packages
        for script in files(package).iterdir()
        if script.name.endswith(".lua")
    ]
    for command, sub in (call for text in texts for call in _CALL.findall(text)):
        if command not in _WITH_SUBCOMMANDS:
            found.add(command.lower())
        elif sub:
            found.add(f"{command}|{sub}".lower())
    return found


def rules(namespace: str, commands: Iterable[str]) -> list[str]:
    """ACL rules for one namespace: its keys, its channels, these commands and nothing else."""
    prefix = f"{{{check_name('namespace', namespace)}:*"
    return ["resetkeys", "resetchannels", f"~{prefix}", f"&{prefix}", "-@all"] + [
        f"+{command}" for command in sorted(set(commands))
    ]


def producer_rules(namespace: str) -> list[str]:
    """The rights of a client: submit, follow, cancel, ask for results."""
    return rules(namespace, _producer_commands())


def gateway_rules(namespace: str) -> list[str]:
    """The rights of a gateway: a client's, and to look at the fleet."""
    return rules(namespace, {*_producer_commands(), *LOOKING})


def _producer_commands() -> set[str]:
    return {*EVERYBODY, *SUBSCRIBER, *CLUSTER, *OWN_PRODUCER, *called_by(PRODUCER_SCRIPTS)}
