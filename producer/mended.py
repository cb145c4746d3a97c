"""redis-py's asyncio connections with two things mended, for the pools that are made here.

- They write commands in Python: 3 us an argument, of which a claim has many. hiredis writes them in
  C, but for a last argument that is large: that is not copied.
- They send under `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives as
  the send completes: a timed-out call would go on for ever. `asyncio.timeout` does not.

Invariant: a cancelled call ends, and its connection is not used again.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, TimeoutError

_NOT_COPIED_BYTES = 4096
_EMPTY = b"$0\r\n\r\n"
"""An empty argument as it is sent."""


def mended(kind: Any) -> Any:
    """A subclass of a redis-py asyncio connection class."""
    methods = {"pack_command": _pack_command, "send_packed_command": _send_packed_command}
    return type(f"Mended{kind.__name__}", (kind,), methods)


def _pack_command(_self: Any, *args: Any) -> list[bytes]:
    head = args[0].encode() if isinstance(args[0], str) else bytes(args[0])
    last = args[-1]
    if len(args) > 1 and isinstance(last, bytes) and len(last) > _NOT_COPIED_BYTES:
        packed = hiredis.pack_command((*head.split(), *args[1:-1], b""))
        return [packed.removesuffix(_EMPTY) + b"$%d\r\n" % len(last), last, b"\r\n"]
    return [hiredis.pack_command((*head.split(), *args[1:]))]


async def _send_packed_command(
    self: Any, command: bytes | str | Iterable[bytes], check_health: bool = True
) -> None:
    if not self.is_connected:
        await self.connect_check_health(check_health=False)
    if check_health:
        await self.check_health()
    if isinstance(command, str):
        command = command.encode()
    try:
        async with asyncio.timeout(self.socket_timeout):
            self._writer.writelines([command] if isinstance(command, bytes) else command)
            await self._writer.drain()
    except builtins.TimeoutError:
        await self.disconnect(nowait=True)
        raise TimeoutError("Timeout writing to socket") from None
    except OSError as error:
        await self.disconnect(nowait=True)
        raise ConnectionError(f"Error while writing to socket: {error}") from error
    except BaseException:
        await self.disconnect(nowait=True)
        raise
