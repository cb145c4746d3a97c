"""Batches that are submitted, cancelled and collected: by whom, and what is left to do then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer import BrokerUnavailable
from tokenfleet.producer.batch import (
    Batch,
    BatchFiles,
    BatchSettings,
    Phase,
    Progress,
    run,
)
from tokenfleet.producer.batch.remote import Remote

Requests = Callable[..., Path]
Outcome = Callable[[BatchFiles], dict[str, Any]]


def prepared(path: Path, **settings: Any) -> Batch:
    return Batch.prepare(BatchFiles.beside(path), settings=BatchSettings(**settings))


async def test_cancelling_ends_the_jobs_and_a_later_run_does_the_rest(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome, until: Any
) -> None:
    path = requests(40)
    batch = prepared(path)
    seen: list[Progress] = []
    run = asyncio.create_task(batch.run(valkey_lab.client(), on_progress=seen.append))
    await until(lambda: seen and seen[-1].waiting == 40)
    cancelled = await Batch.open(batch.files).cancel(valkey_lab.client())
    summary = await run
    assert (summary.phase, cancelled.phase, summary.left) == (Phase.CANCELLED, Phase.CANCELLED, 40)
    assert not outcome(batch.files)
    async with working(valkey_lab) as worker:
        again = await prepared(path).run(valkey_lab.client())
    assert (again.phase, again.completed, len(worker.seen)) == (Phase.COMPLETED, 40, 40)
    assert len(outcome(batch.files)) == 40


async def test_a_submitted_batch_is_collected_later_by_whoever_comes(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome, until: Any
) -> None:
    path = requests(600)
    batch = prepared(path)
    submitted = await batch.submit(valkey_lab.client())
    assert (submitted.phase, submitted.left) == (Phase.SUBMITTED, 600)
    before = await Batch.open(batch.files).collect(valkey_lab.client())
    assert (before.phase, before.left) == (Phase.SUBMITTED, 600)
    async with working(valkey_lab) as worker:
        while (await Batch.open(batch.files).collect(valkey_lab.client())).left:
            pass
    after = Batch.open(batch.files).summary()
    assert (after.phase, after.completed, len(worker.seen)) == (Phase.COMPLETED, 600, 600)
    assert len(outcome(batch.files)) == 600


async def test_cancelling_a_submitted_batch_needs_no_process_at_it(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome
) -> None:
    path = requests(10)
    await prepared(path).submit(valkey_lab.client())
    summary = await prepared(path).cancel(valkey_lab.client())
    assert summary.phase is Phase.CANCELLED
    async with working(valkey_lab) as worker:
        await prepared(path).run(valkey_lab.client())
    assert (len(worker.seen), len(outcome(BatchFiles.beside(path)))) == (10, 10)


async def test_results_of_a_cancelled_batch_leave_cancelled_lines_to_the_next_round(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome, tools: Any, until: Any
) -> None:
    path = requests(10)
    files = BatchFiles.beside(path)
    few = {f"say {number}" for number in range(1, 5)}
    answer = lambda r: tools.echo(r) if r.messages[-1]["content"] in few else None  # noqa: E731
    async with working(valkey_lab, answer) as worker:
        await prepared(path).submit(valkey_lab.client())
        await until(lambda: len(worker.seen) == 10)
        cancelled = await prepared(path).cancel(valkey_lab.client())
        assert (cancelled.completed, cancelled.left) == (4, 6), "what had ended is not run again"
        for job in worker.held:
            await worker.cancelled(job)
        collected = await Batch.open(files).collect(valkey_lab.client())
    assert (collected.phase, collected.failed, collected.left) == (Phase.CANCELLED, 0, 6)
    async with working(valkey_lab, worker_id="w2"):
        summary = await prepared(path).run(valkey_lab.client())
    assert (summary.completed, len(outcome(files))) == (10, 10)


async def test_cancelling_while_lines_are_submitted_ends_those_that_are_in_the_queue(
    valkey_lab: Any, requests: Requests, until: Any
) -> None:
    from tokenfleet.worker.rules import Rules, TenantLimits

    await Rules(valkey_lab.connection).set_limits(TenantLimits("default", waiting=20))
    batch = prepared(requests(60))
    notes: list[str | None] = []
    client = valkey_lab.client()
    submit = asyncio.create_task(batch.submit(client, on_progress=lambda p: notes.append(p.note)))
    await until(lambda: notes and notes[-1] is not None)
    cancelled = await Batch.open(batch.files).cancel(valkey_lab.client())
    assert (await submit).phase is cancelled.phase is Phase.CANCELLED
    states = [await valkey_lab.state(batch.state.job_id(line)) for line in range(1, 61)]
    assert (states.count("cancelled"), states.count(None)) == (20, 40)


async def test_cancelling_begins_anew_when_redis_was_away_in_the_midst_of_it(
    valkey_lab: Any, requests: Requests, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenfleet.worker.rules import Rules, TenantLimits

    cancel, calls = Remote.cancel, []

    async def away_at_first(self: Remote, flights: Any) -> None:
        calls.append(len(flights))
        if len(calls) == 1:
            raise BrokerUnavailable("away")
        await cancel(self, flights)

    monkeypatch.setattr(Remote, "cancel", away_at_first)
    monkeypatch.setattr(run, "_AWAY_PAUSE_S", 0.0)
    await Rules(valkey_lab.connection).set_limits(TenantLimits("default", waiting=5))
    batch = prepared(requests(10))
    notes: list[str | None] = []
    client = valkey_lab.client()
    submit = asyncio.create_task(batch.submit(client, on_progress=lambda p: notes.append(p.note)))
    await until(lambda: notes and notes[-1] is not None)
    batch.files.cancel.touch()
    assert (await submit).phase is Phase.CANCELLED
    states = [await valkey_lab.state(batch.state.job_id(line)) for line in range(1, 11)]
    assert (states.count("cancelled"), states.count(None)) == (5, 5)


async def test_cancelling_writes_results_that_do_not_fit_into_one_look(
    valkey_lab: Any, requests: Requests, working: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    look = Remote.look

    async def small(self: Remote, flights: Any) -> Any:
        return await look(self, flights, most_bytes=1)

    path = requests(5)
    batch = prepared(path)
    await batch.submit(valkey_lab.client())
    async with working(valkey_lab):
        ended = [batch.state.job_id(line) for line in range(1, 6)]
        for job_id in ended:
            await until(lambda job_id=job_id: _is(valkey_lab, job_id, "finished"))
    monkeypatch.setattr(Remote, "look", small)
    assert (await prepared(path).cancel(valkey_lab.client())).completed == 5


async def _is(lab: Any, job_id: str, state: str) -> bool:
    return bool(await lab.state(job_id) == state)
