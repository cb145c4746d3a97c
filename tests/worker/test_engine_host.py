"""What ends a worker and what only ends an engine: settings that were right once stay right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tokenfleet.engine import ConfigError
from tokenfleet.worker.engine_link import engine_host
from tokenfleet.worker.engine_link.engine_host import EngineHost, EngineLost

REFUSAL = ConfigError("4096 KV blocks take 8.00 GiB and 2.00 GiB are free for them")


class Engine:
    """One that starts, or refuses to, and ends at once."""

    pid = None
    last_heard = 0.0
    stepped = True

    def __init__(self, refusal: Exception | None) -> None:
        self._refusal = refusal

    async def start(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    async def batches(self) -> AsyncIterator[Any]:
        for batch in ():
            yield batch

    async def cause_of_death(self) -> str:
        return "killed by SIGKILL"


class Fleet:
    """Makes one engine after the other, and keeps why jobs were handed back."""

    def __init__(self, *refusals: Exception | None) -> None:
        self._refusals = list(refusals)
        self.causes: list[str] = []

    def host(self) -> EngineHost:
        launcher = SimpleNamespace(
            engine=None, working_since=None, now=lambda: None, died=lambda: None
        )
        dispatcher: Any = SimpleNamespace(launcher=launcher, hand_back=self._hand_back)
        roster: Any = type("Roster", (list,), {"touch": lambda _self: None})()
        telemetry: Any = SimpleNamespace(engine_restarted=lambda: None)
        make: Any = lambda: Engine(self._refusals.pop(0))  # noqa: E731  # it stands for a class
        return EngineHost(
            make, dispatcher, roster, telemetry, step_limit_s=1.0, start_limit_s=60.0,
            on_ready=lambda _info: None,
        )  # fmt: skip

    async def _hand_back(self, _jobs: list[Any], cause: str, *, engine_died: bool) -> None:
        assert engine_died
        self.causes.append(cause)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(engine_host, "FIRST_BACKOFF_S", 0.0)


async def test_a_first_engine_that_is_refused_ends_the_worker():
    fleet = Fleet(REFUSAL)
    with pytest.raises(ConfigError, match="KV blocks"):
        await fleet.host().run()
    assert fleet.causes == []


async def test_a_later_engine_that_finds_no_memory_is_tried_again():
    """A killed engine's memory, or what a neighbour took meanwhile, may come back."""
    fleet = Fleet(None, REFUSAL, REFUSAL, None, *[REFUSAL] * engine_host.MAX_DEATHS)
    with pytest.raises(EngineLost, match="GiB are free"):
        await asyncio.wait_for(fleet.host().run(), 60)
    killed, refused = "killed by SIGKILL", f"ConfigError: {REFUSAL}"
    last = engine_host.MAX_DEATHS - 1  # the death before them counts
    assert fleet.causes == [killed, refused, refused, killed, *[refused] * last]
