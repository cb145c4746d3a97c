"""What a forked child does with the connections that it inherits: nothing at all.

Parent and child share the sockets and the poller that waits for them. A connection that the child
closes, or that its collector closes for it, is taken out of the parent's poller, and the parent
waits in vain for the next reply. So the child keeps what it inherits, and uses connections of its
own.

Invariant: what is kept for the parent lives as long as the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_kept: list[dict[str, Any]] = []


def keep_for_parent(owner: Any) -> None:
    """What an object holds at a fork outlives it in the child."""
    _owners.add(owner)


def _keep() -> None:
    _kept.extend(dict(vars(owner)) for owner in list(_owners))


os.register_at_fork(after_in_child=_keep)
