"""What a test leaves behind is its own failure, and not that of the one during which it is found.

Looked at after each test: sockets that nobody can reach any more, and who is still connected to a
server that the next test uses too.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tokenfleet.producer.embedded import EmbeddedServer

_SOCKETS = pytest.StashKey[set[str]]()
_SHARED = pytest.StashKey[list["Shared"]]()
_SERVERS = {"valkey", "any_server", "redis_server", "shared_server"}
"""Fixtures that give one."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """A socket of this test that only the collector closes was left open by it, also one that its
    fixtures still hold."""
    yield
    found = _open_sockets()
    new, left = found - item.session.stash.get(_SOCKETS, set()), []
    if new:
        _forget_fixtures(item)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            gc.collect()
        found = _open_sockets()
        left = [str(one.message) for one in warned if one.category is ResourceWarning]
    item.session.stash[_SOCKETS] = found
    assert new <= found or not left, f"left open: {left}"  # another thread may close one meanwhile


def _forget_fixtures(item: pytest.Item) -> None:
    """They have ended; pytest itself drops them only after all that is done after a test."""
    if isinstance(item, pytest.Function):
        item.funcargs.clear()


def _open_sockets() -> set[str]:
    """Of this process."""
    found = set()
    for fd in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(str(fd.readlink()))
    return {name for name in found if name.startswith("socket:")}


class Shared:
    """A server that many tests use, one after the other."""

    LEAVE_S = 20.0
    """How late it may see that somebody has gone."""

    def __init__(self, asking: redis.Redis) -> None:
        self._asking = asking
        self._known: set[str] = set()

    def check(self) -> None:
        """Who is still connected after a test would take part in the next one."""
        give_up = time.monotonic() + self.LEAVE_S
        while others := self._others():
            if time.monotonic() > give_up:
                self._known |= {other["id"] for other in others}  # not the next test's fault too
                raise AssertionError(f"still connected: {others}")
            time.sleep(0.002)

    def _others(self) -> list[Any]:
        clients: Any = self._asking.client_list()
        told = self._known | {str(self._asking.client_id())}
        return [client for client in clients if client["id"] not in told]


@pytest.fixture(autouse=True)
def nobody_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if _SERVERS & set(request.fixturenames):
        for server in request.session.stash.get(_SHARED, []):
            server.check()


@contextlib.contextmanager
def shared(server: EmbeddedServer, session: pytest.Session) -> Iterator[EmbeddedServer]:
    """Run such a server, and look at it after each test."""
    with server, redis.Redis.from_url(server.url, socket_timeout=60) as asking:
        looked_at = Shared(asking)
        session.stash.setdefault(_SHARED, []).append(looked_at)
        yield server
        session.stash[_SHARED].remove(looked_at)
