"""A worker with nothing to do: quiet for as long as it takes, and there when something comes."""

from __future__ import annotations

import threading
from typing import Any

import structlog

from tokenfleet.engine import text
from tokenfleet.engine.sampling_params import SamplingParams
from tokenfleet.worker import doorbell, taker
from tokenfleet.worker.prepare import Preparer
from tokenfleet.worker.standing import StandingClaim

ROUNDS = 30


async def test_an_idle_worker_says_nothing_and_takes_the_next_job(
    fleet, until, monkeypatch
) -> None:
    """Its claim at the server runs out again and again; that is no trouble of any kind."""
    monkeypatch.setattr(taker, "BLOCK_MS", 5)
    run, rounds = StandingClaim.run, []

    async def counted(self: StandingClaim, *args: Any) -> Any:
        rounds.append(self.ticket)
        return await run(self, *args)

    monkeypatch.setattr(StandingClaim, "run", counted)
    with structlog.testing.capture_logs() as lines:
        worker = fleet.worker()
        await until(lambda: len(rounds) >= ROUNDS)
        assert worker.not_ready() == []
        job = await fleet.submit()
        await until(lambda: fleet.has(job))
    assert "worker_ready" in {line["event"] for line in lines}
    assert [line for line in lines if line["log_level"] in ("warning", "error")] == []


async def test_a_bell_runs_out_well_before_its_socket_does(fleet) -> None:
    """A call that outlives its socket's timeout is an outage to the worker, every time."""
    pool = fleet.worker().parts.connection.client.connection_pool
    assert 0 < 2 * doorbell.BLOCK_MS / 1000 < pool.connection_kwargs["socket_timeout"]


def test_the_first_job_does_not_wait_for_tables_of_the_tokenizer(byte_model, monkeypatch) -> None:
    """They take a tenth of a second to build for a large vocabulary; also without a template."""
    built: list[str] = []
    make = text.PieceTable

    def watched(tokenizer: Any, special: frozenset[int]) -> text.PieceTable:
        built.append(threading.current_thread().name)
        return make(tokenizer, special)

    monkeypatch.setattr(text, "PieceTable", watched)
    told, preparer = threading.Event(), Preparer()
    preparer.codec = codec = text.TextCodec.load(byte_model)
    codec.chat_template = None
    preparer.warm(told.set)
    assert told.wait(60)
    assert [name.startswith("tokenize") for name in built] == [True]
    codec.stream(SamplingParams())
    assert len(built) == 1
    preparer.close()


def test_that_all_is_loaded_is_said_also_where_the_chat_template_is_broken() -> None:
    class Broken:
        def encode_chat(self, messages: object) -> list[int]:
            raise ValueError("no template")

    told, preparer = threading.Event(), Preparer()
    preparer.codec = Broken()  # type: ignore[assignment]  # nothing else is asked of it
    preparer.warm(told.set)
    assert told.wait(60)
    preparer.close()
