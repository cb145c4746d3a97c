"""Whether this user may run a script whole, asked before the script runs for the first time.

Redis checks a user's rights at each command that a script calls: one that is refused midway has
written what stood before it, and left the rest. So all that a script may call is read off its text,
and tried on keys of every kind that it may be called on, by a script that changes nothing. A
channel is not among it: who may announce nothing writes all the same (common.lua).

Invariant: a script that this user may not run to its end is not begun.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from tokenfleet.producer.errors import BrokerUnsupported
from tokenfleet.producer.keys import GROUP
from tokenfleet.producer.kinds import samples
from tokenfleet.producer.scripts import Executor, Script

_FUNCTION = re.compile(
    r"^local function (\w+)\((?:[^\n]*\bend$|.*?^end$)", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"--.*$", re.MULTILINE)
_CALL = re.compile(r"(?:redis\.p?call\(|\{ )'([A-Z]+)'(?:, *'([A-Z]+)')?")
_CHOSEN = re.compile(r"'(S(?:ADD|REM))'")
_WITH_SUBCOMMANDS = frozenset({"PUBSUB", "XGROUP", "XINFO"})
_TYPES = {"H": "hash", "X": "stream", "Z": "zset", "S": "set"}
_OTHER = {"GET": "string", "SET": "string"}
_ANY = frozenset({"EXISTS", "TYPE", "DEL", "PEXPIRE"})
_SHOWN = 6

_PROBE = Script(
    "probe",
    """
local refused = {}
for i, call in ipairs(redis.acl_check_cmd and ARGV or {}) do
  local words = {}
  for word in string.gmatch(call, '%S+') do words[#words + 1] = word end
  local known, allowed = pcall(redis.acl_check_cmd, unpack(words))
  if not (known and allowed) then refused[#refused + 1] = call end
end
return refused
""",
)


@cache
def commands_of(script: Script) -> tuple[tuple[str, ...], ...]:
    """The commands that a script may call, with their subcommands: those of its own lines and of
    the functions that these lead to."""
    text = _COMMENT.sub("", script.text)
    bodies = {found[1]: found[0] for found in _FUNCTION.finditer(text)}
    reached, ahead = "", _FUNCTION.sub("", text)
    while ahead:
        reached += ahead
        names = set(re.findall(r"\w+", ahead)) & bodies.keys()
        ahead = "\n".join(bodies.pop(name) for name in sorted(names))
    found: dict[tuple[str, ...], None] = {}
    for command, sub in (*_CALL.findall(reached), *((one, "") for one in _CHOSEN.findall(reached))):
        if command not in _WITH_SUBCOMMANDS:
            found[(command,)] = None
        elif sub or command == "PUBSUB":
            found[(command, sub or "?")] = None
    return tuple(found)


def calls_of(script: Script, prefix: str, announce: str) -> list[str]:
    """The same as calls to try: every command on a key of every kind that it goes with."""
    calls = []
    for words in commands_of(script):
        name = words[0]
        if name == "PUBSUB":
            words = (name, "SHARDNUMSUB" if announce == "SPUBLISH" else "NUMSUB")
        line = " ".join(words)
        kind = _OTHER.get(name) or _TYPES.get(name[0])
        if name == "XREADGROUP":
            line = f"{line} GROUP {GROUP} c STREAMS"
            calls += [f"{line} {key} >" for key in samples(prefix, kind)]
        elif name in _ANY or kind is not None:
            keys = samples(prefix, None if name in _ANY else kind)
            calls += [f"{line} {key}" for key in keys]
        else:
            calls.append(line)
    return calls


async def check_allowed(
    client: Executor, scripts: Sequence[Script], prefix: str, announce: str, key: str
) -> None:
    """Raises BrokerUnsupported, with what is missing, where the user may not run the scripts whole.

    `key`: one that they are called with; on a cluster it leads to the server to ask.
    """
    calls = {script.name: calls_of(script, prefix, announce) for script in scripts}
    every = list(dict.fromkeys(call for of_one in calls.values() for call in of_one))
    refused = {call.decode() for call in await _PROBE.run(client, [key], list(every))}
    if refused:
        names = [f"`{name}`" for name, of_one in calls.items() if refused & set(of_one)]
        raise BrokerUnsupported(
            f"Redis does not let this user run {_some(names)} to the end, so nothing was begun; "
            f"it may not: {_some(_named(refused, every))}; "
            "`tokenfleet acl` prints the rights that each role needs"
        )


def _named(refused: set[str], calls: list[str]) -> list[str]:
    """Commands that are refused on all keys by their name, others with the keys."""
    on_keys: dict[str, list[str]] = {}
    for call in calls:
        on_keys.setdefault(call.partition(" {")[0].partition(" GROUP ")[0], []).append(call)
    names: list[str] = []
    for command, alike in on_keys.items():
        if refused.issuperset(alike):
            names.append(command)
        else:
            keys = [call[call.index("{") :].split()[0] for call in alike if call in refused]
            names += [f"{command} on {key}" for key in keys]
    return names


def _some(names: list[str]) -> str:
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])
