"""The Lua scripts: every move of a job is one of them, run in one piece inside Redis.

`common.lua`, `tenants.lua` and `moves.lua` stand in front of each. A script is called by its
digest, and sent once when the server does not know it (a restart, SCRIPT FLUSH, a new master).

Invariant: a script's text is fixed at import; its digest names exactly that text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha1
from importlib.resources import files
from typing import Any, Protocol

from redis.exceptions import NoScriptError

_IN_FRONT = ("common", "tenants", "moves")


class Executor(Protocol):
    """What a redis-py asyncio client (plain or cluster) offers for our use."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Send one command and return its reply."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script, with the common part in front."""

    name: str
    text: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        digest = sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "digest", digest)

    async def run(self, client: Executor, keys: list[str], args: list[Any]) -> Any:
        """One EVALSHA; EVAL once when the server does not know the script."""
        try:
            return await client.execute_command(*self.call(keys, args))
        except NoScriptError:
            return await client.execute_command("EVAL", self.text, len(keys), *keys, *args)

    def call(self, keys: list[str], args: list[Any]) -> tuple[Any, ...]:
        """The command that runs it where the server knows it."""
        return ("EVALSHA", self.digest, len(keys), *keys, *args)


def load(package: str, name: str, *before: str) -> Script:
    """The script `<name>.lua` of a package of scripts; `before`: others of it put in front."""
    parts = [files("tokenfleet.producer.lua").joinpath(f"{part}.lua") for part in _IN_FRONT]
    parts += [files(package).joinpath(f"{part}.lua") for part in (*before, name)]
    return Script(name, "\n".join(part.read_text() for part in parts))


SUBMIT = load("tokenfleet.producer.lua", "submit")
CANCEL = load("tokenfleet.producer.lua", "cancel")
READ = load("tokenfleet.producer.lua", "read")
