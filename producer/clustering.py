"""redis-py's asyncio cluster client with three things mended: no server's trouble is the others'.

- After a call that one server did not answer it asks for the cluster's layout before any other
  call, maybe that same server first, and all wait for it. Here calls go on by the layout that is
  known, and the new one is looked for beside them.
- When a slot is down it closes the connections to all servers, under the calls of the others. Here
  it looks for the layout, as above.
- While the keys of a slot move one by one to another server it follows those that have gone (ASK).
  A script that does finds none of the others there, and makes them anew: the move then stops at
  them (BUSYKEY), and what they held is lost to one side. Here such a call waits for the whole slot.

Invariant: a call waits for the server that it goes to, and for no other, once the client has seen
the cluster; nothing is written to a slot where it does not lie yet.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio as aio
from redis.exceptions import (
    AskError,
    ConnectionError,
    MovedError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)


def staying(kind: Any) -> Any:
    """A subclass of a connection class that does not tell of keys that have gone ahead."""

    async def read_response(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return await kind.read_response(self, *args, **options)
        except MovedError:  # an AskError to redis-py, and a slot that lies there for good
            raise
        except AskError as error:
            moves = f"TRYAGAIN slot {error.slot_id} is on its way to another server"
            raise TryAgainError(moves) from error

    return type(f"Staying{kind.__name__}", (kind,), {"read_response": read_response})


class Cluster(aio.RedisCluster):
    """See above. Closed by `hang_up` alone."""

    _looking: asyncio.Task[None] | None = None
    """Finds out who serves what now."""
    _silent: str | None = None
    """The server that failed last: it is asked last."""

    async def initialize(self, *args: Any, **options: Any) -> Any:
        """Find the servers: at once the first time, beside the calls later."""
        if not self._initialize or not self.nodes_manager.slots_cache:
            return await super().initialize(*args, **options)
        self._initialize = False
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="tokenfleet-cluster")
        return self

    async def _look(self) -> None:
        try:
            await self.nodes_manager.initialize(last_failed_node_name=self._silent)
        except (RedisError, RedisClusterException, OSError):
            self._initialize = True  # the next call has it looked for again

    async def _execute_command(self, target_node: Any, *args: Any, **options: Any) -> Any:
        try:
            return await super()._execute_command(target_node, *args, **options)
        except (ConnectionError, TimeoutError):
            self._silent = target_node.name
            raise

    async def aclose(self) -> None:
        """What redis-py calls to have the layout looked for."""
        self._initialize = True

    async def hang_up(self) -> None:
        """Close all connections."""
        looking, self._looking, self._initialize = self._looking, None, True
        if looking is not None:
            looking.cancel()
            await asyncio.wait([looking])
        await self.nodes_manager.aclose()
        await self.nodes_manager.aclose("startup_nodes")
