"""What type belongs at each key, and how to find one at which somebody else's value lies.

Redis says WRONGTYPE and not of which key. So who meets it looks at the keys that it may have been.

Invariant: what is found is named and never touched: it is somebody's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from tokenfleet.producer.errors import BrokerUnsupported, KeyOccupied

WRONG_TYPE = "WRONGTYPE"

_KINDS = {
    "q": "stream",
    "j": "hash",
    "e": "stream",
    "delay": "zset",
    "deadline": "zset",
    "live": "zset",
    "dead": "zset",
    "idem": "string",
    "paused": "set",
    "bell": "stream",
    "limits": "hash",
    "backlogs": "set",
    "turns": "zset",
    "workers": "zset",
    "worker": "hash",
    "standing": "string",
}
_OF_A_TENANT = {"running": "set", "waiting": "set", "parked": "set", "drain": "hash", "q": "zset"}
_SHARED = ("delay", "deadline", "paused", "limits", "dead", "workers")


def kind_of(key: str) -> str | None:
    """The type that belongs at a key; None for a name that is none of ours."""
    what, _, rest = key.partition("}:")[2].partition(":")
    if what == "tenant":
        return _OF_A_TENANT.get(rest.partition(":")[2].partition(":")[0])
    return _KINDS.get(what)


def samples(prefix: str, kind: str | None) -> list[str]:
    """A key for every sort of key of this type in a partition; None: of any type."""
    names = [name for name, found in _KINDS.items() if kind in (None, found)]
    names += [f"tenant:t:{name}" for name, found in _OF_A_TENANT.items() if kind in (None, found)]
    return [f"{prefix}:{name}" if name in _SHARED else f"{prefix}:{name}:x" for name in names]


def around(keys: Iterable[str]) -> list[str]:
    """The keys given, and those that scripts build from them: of the same queues and partition."""
    found: dict[str, None] = {}
    for key in keys:
        found[key] = None
        prefix, _, rest = key.partition("}:")
        if rest.startswith("q:"):
            model, _, priority = rest[2:].removesuffix(":front").rpartition(":")
            names = [f"q:{model}:{priority}", f"q:{model}:{priority}:front"]
            names += [f"live:{model}", f"bell:{model}"]
            names += [f"turns:{model}:{priority}", f"backlogs:{model}:{priority}"]
            found.update(dict.fromkeys(f"{prefix}}}:{name}" for name in names))
        found.update(dict.fromkeys(f"{prefix}}}:{name}" for name in _SHARED))
    return list(found)


async def occupied(
    keys: Iterable[str], type_of: Callable[[str], Awaitable[bytes]]
) -> KeyOccupied | None:
    """The first of the keys at which something lies that is not ours; None where none does.

    `type_of` asks for a key's type.
    """
    for key in keys:
        found, wanted = (await type_of(key)).decode(), kind_of(key)
        if wanted is not None and found not in (wanted, "none"):
            return KeyOccupied(key, found, wanted)
    return None


async def blame(
    keys: Iterable[str], prefix: str, type_of: Callable[[str], Awaitable[bytes]]
) -> KeyOccupied:
    """The error to raise for a WRONGTYPE of a call about `keys`, whatever can be found out."""
    try:
        found = await occupied(around(keys), type_of)
    except BrokerUnsupported:  # this user may not ask
        found = None
    return found or KeyOccupied(f"a key of {prefix}", "foreign value", "value of its own")
