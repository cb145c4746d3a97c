"""Taking up a batch that was begun: from what is on disk, and only where it is the same batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.batch import (
    Batch,
    BatchBusy,
    BatchError,
    BatchFiles,
    BatchSettings,
    FileRules,
    Phase,
    Progress,
    find_files,
)

Requests = Callable[..., Path]
Outcome = Callable[[BatchFiles], dict[str, Any]]


def prepared(path: Path, **settings: Any) -> Batch:
    return Batch.prepare(BatchFiles.beside(path), settings=BatchSettings(**settings))


async def test_a_completed_batch_that_is_run_again_only_says_so(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    path = requests(3)
    async with working(valkey_lab) as worker:
        first = await prepared(path).run(valkey_lab.client())
    again = prepared(path)
    content = again.files.output.read_bytes()
    second = await again.run(valkey_lab.client())
    assert (second.completed, second.worker_s) == (first.completed, first.worker_s)
    assert (again.files.output.read_bytes(), len(worker.seen)) == (content, 3)


async def test_a_stopped_run_goes_on_where_it_was_and_no_job_runs_twice(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome, until: Any, tools: Any
) -> None:
    path = requests(200)
    gate = asyncio.Event()

    def answer(request: Any) -> Any:
        return tools.echo(request) if gate.is_set() or len(worker.seen) <= 50 else None

    async with working(valkey_lab, answer) as worker:
        batch = prepared(path)
        run = asyncio.create_task(batch.run(valkey_lab.client(), in_flight=80))
        await until(lambda: len(tools.read_json_lines(batch.files.output)) == 50)
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()
        before = {job.messages[-1]["content"] for job in worker.seen}
        assert len(before) == len(worker.seen) >= 64
        gate.set()
        held = list(worker.held)
        run = asyncio.create_task(prepared(path).run(valkey_lab.client(), in_flight=80))
        await asyncio.gather(*(worker.end(job) for job in held))
        summary = await run
    assert (summary.completed, summary.left) == (200, 0)
    assert len(outcome(batch.files)) == 200
    prompts = [job.messages[-1]["content"] for job in worker.seen]
    assert len(prompts) == len(set(prompts)) == 200


async def test_a_torn_last_line_is_cut_off_and_fetched_again(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome
) -> None:
    path = requests(20)
    async with working(valkey_lab) as worker:
        batch = prepared(path)
        await batch.run(valkey_lab.client())
        whole = batch.files.output.read_bytes()
        for cut in (1, 10, len(whole.splitlines(keepends=True)[-1]), len(whole)):
            batch.files.output.write_bytes(whole[:-cut])
            batch.state.at(Phase.RUNNING).write(batch.files.state)
            batch = prepared(path)
            summary = await batch.run(valkey_lab.client())
            assert (summary.completed, len(outcome(batch.files))) == (20, 20)
    assert len(worker.seen) == 20, "results are still in Redis: nothing runs twice"


async def test_zeros_that_a_power_cut_left_behind_are_cut_off(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome
) -> None:
    path = requests(5)
    async with working(valkey_lab):
        batch = prepared(path)
        await batch.run(valkey_lab.client())
        with batch.files.output.open("ab") as file:
            file.write(bytes(3_000_000))
        batch.state.at(Phase.RUNNING).write(batch.files.state)
        summary = await prepared(path).run(valkey_lab.client())
    assert (summary.completed, len(outcome(batch.files))) == (5, 5)


async def test_jobs_that_redis_has_lost_are_submitted_again(
    bare_lab: Any, requests: Requests, working: Any, outcome: Outcome, until: Any
) -> None:
    batch = prepared(requests(30))
    seen: list[Progress] = []
    run = asyncio.create_task(batch.run(bare_lab.client(), on_progress=seen.append))
    await until(lambda: seen and seen[-1].waiting == 30)
    await bare_lab.raw.flushdb()
    async with working(bare_lab):
        summary = await run
    assert (summary.completed, summary.resubmitted) == (30, 30)
    assert len(outcome(batch.files)) == 30


async def test_an_input_that_shrinks_while_it_runs_ends_the_run(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    batch = prepared(requests(10))
    requests(7)
    async with working(valkey_lab):
        with pytest.raises(BatchError, match="changed while it ran"):
            await batch.run(valkey_lab.client())


async def test_looking_at_a_batch_never_keeps_another_from_it(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    path = requests(3)
    batch = prepared(path)
    async with working(valkey_lab):
        looks = [asyncio.to_thread(Batch.open(batch.files).glance) for _ in range(20)]
        summary, *_ = await asyncio.gather(batch.run(valkey_lab.client()), *looks)
    assert summary.completed == 3


async def test_nothing_of_a_killed_write_is_left_lying_about(
    valkey_lab: Any, requests: Requests, working: Any, tmp_path: Path
) -> None:
    batch = prepared(requests(1))
    (tmp_path / f"{batch.files.state.name}.999999.tmp").write_text("half")
    async with working(valkey_lab):
        await batch.run(valkey_lab.client())
    kept = ("requests.jsonl", "requests.output.jsonl", "requests.errors.jsonl")
    assert everything_in(tmp_path) == {*kept, "requests.output.jsonl.batch"}


def everything_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_one_process_at_a_time_writes(
    valkey_lab: Any, requests: Requests, working: Any, until: Any
) -> None:
    path = requests(5)
    batch = prepared(path)
    run = asyncio.create_task(batch.run(valkey_lab.client()))
    await until(lambda: Batch.open(batch.files).glance().busy)
    with pytest.raises(BatchBusy, match="another process"):
        await prepared(path).run(valkey_lab.client())
    async with working(valkey_lab):
        await run
    assert not batch.glance().busy


def test_an_input_that_has_changed_is_refused(requests: Requests) -> None:
    path = requests(3)
    prepared(path)
    requests(4)
    with pytest.raises(BatchError, match="has changed"):
        prepared(path)


def test_other_settings_are_refused_by_name(requests: Requests) -> None:
    path = requests(3)
    prepared(path)
    with pytest.raises(BatchError, match="ordered=False, not True"):
        prepared(path, ordered=True)
    with pytest.raises(BatchError, match="model=None, not 'x'"):
        Batch.prepare(BatchFiles.beside(path), FileRules(model="x"))


def test_an_output_that_is_somebody_elses_is_left_alone(requests: Requests) -> None:
    path = requests(3)
    files = BatchFiles.beside(path)
    files.output.write_text("mine\n")
    with pytest.raises(BatchError, match="no batch known here"):
        prepared(path)
    assert files.output.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "batch_req_0000_1"}', "another batch"),
        ("not json", "edited"),
        ("[]", "edited"),
    ],
)
async def test_a_strangers_line_in_the_output_is_named(
    line: str, message: str, valkey_lab: Any, requests: Requests
) -> None:
    batch = prepared(requests(3))
    batch.files.output.write_text(line + "\n")
    with pytest.raises(BatchError, match=rf"output\.jsonl.*{message}"):
        await batch.run(valkey_lab.client())


async def test_a_line_that_is_there_twice_is_named(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    batch = prepared(requests(3))
    async with working(valkey_lab):
        await batch.run(valkey_lab.client())
    content = batch.files.output.read_bytes()
    batch.files.output.write_bytes(content + content.splitlines(keepends=True)[0])
    batch.state.at(Phase.RUNNING).write(batch.files.state)
    with pytest.raises(BatchError, match="there twice"):
        await Batch.open(batch.files).run(valkey_lab.client())


def test_a_batch_is_found_by_any_of_its_names(requests: Requests, tmp_path: Path) -> None:
    path = requests(1)
    files = prepared(path).files
    for name in (path, files.output, files.state):
        assert find_files(name) == files
    with pytest.raises(BatchError, match="no batch was begun"):
        find_files(tmp_path / "other.jsonl")
