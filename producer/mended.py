"""redis-py's asyncio connections with four things mended, for the pools that are made here.

- They write commands in Python: 3 us an argument, of which a claim has many. hiredis writes them in
  C, but for a last argument that is large: that is not copied.
- They send under `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives as
  the send completes: a timed-out call would go on for ever. `asyncio.timeout` does not.
- A pool that is closed while calls are under way closes what is connected at that moment; what
  those calls connect afterwards stays open for ever. A door that is shut lets nothing more through.
- A connection is closed once the server has taken what was sent: one that stands still never does,
  and its socket stays open. What is not wanted any more is cut.

Invariant: a cancelled call ends, and its connection is not used again; behind a door that was shut
there is no open connection.
"""

from __future__ import annotations

import asyncio
import builtins
import weakref
from collections.abc import Iterable
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, TimeoutError

_NOT_COPIED_BYTES = 4096
_EMPTY = b"$0\r\n\r\n"
"""An empty argument as it is sent."""


class Door:
    """What the connections of one client go through."""

    def __init__(self) -> None:
        self._open = True
        self._beyond: weakref.WeakSet[Any] = weakref.WeakSet()

    def check(self) -> None:
        """Raises redis-py's ConnectionError where it is shut."""
        if not self._open:
            raise ConnectionError("Connection closed by its client")

    def passed(self, connection: Any) -> None:
        """It is connected; raises as `check` does."""
        self._beyond.add(connection)
        self.check()

    def shut(self) -> None:
        """Cut all connections, at once and for good; calls on them end with an error."""
        self._open = False
        for connection in list(self._beyond):
            _cut(connection)


def mended(kind: Any, door: Door) -> Any:
    """A subclass of a redis-py asyncio connection class."""

    async def connect(self: Any) -> None:
        door.check()
        await kind._connect(self)
        try:
            door.passed(self)
        except ConnectionError:
            await self.disconnect(nowait=True)
            raise

    async def disconnect(self: Any, *args: Any, **options: Any) -> None:
        _cut(self)
        await kind.disconnect(self, *args, **options)

    def forget(self: Any, *args: Any) -> None:
        if _is_cut(self):
            self._writer = None  # nothing is left open, and nothing to complain of
        kind.__del__(self, *args)

    methods = {"pack_command": _pack_command, "send_packed_command": _send_packed_command}
    methods |= {"_connect": connect, "disconnect": disconnect, "__del__": forget}
    return type(f"Mended{kind.__name__}", (kind,), methods)


def _cut(connection: Any) -> None:
    if (writer := connection._writer) is not None:
        writer.transport.abort()


def _is_cut(connection: Any) -> bool:
    writer = getattr(connection, "_writer", None)
    return writer is not None and bool(writer.transport.is_closing())


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
