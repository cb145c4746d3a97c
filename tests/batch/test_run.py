"""Running a batch against a real server: every line once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer import BrokerUnavailable, InvalidJob
from tokenfleet.producer.batch import (
    Batch,
    BatchBusy,
    BatchError,
    BatchFiles,
    BatchRefused,
    BatchSettings,
    FileRules,
    Phase,
    Progress,
    check_file,
    find_files,
    run,
)
from tokenfleet.producer.batch.remote import Remote
from tokenfleet.producer.protocol import EventError

Requests = Callable[..., Path]
Outcome = Callable[[BatchFiles], dict[str, Any]]


def prepared(path: Path, **settings: Any) -> Batch:
    return Batch.prepare(BatchFiles.beside(path), settings=BatchSettings(**settings))


def said(line: dict[str, Any]) -> str:
    text: str = line["response"]["body"]["choices"][0]["message"]["content"]
    return text


async def test_every_line_is_answered_once_in_the_shape_of_the_api(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome
) -> None:
    batch = prepared(requests(300))
    async with working(valkey_lab) as worker:
        summary = await batch.run(valkey_lab.client())
    found = outcome(batch.files)
    assert {name: said(line) for name, line in found.items()} == {
        f"c{number}": f"say {number}"[::-1] for number in range(1, 301)
    }
    line = found["c7"]
    assert (line["error"], line["response"]["status_code"]) == (None, 200)
    body = line["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    assert body["usage"]["total_tokens"] == 5 + len("say 7")
    assert body["tokenfleet"]["worker"] == "w1"
    assert {job.priority for job in worker.seen} == {"batch"}
    assert len(worker.seen) == 300
    assert (summary.phase, summary.completed, summary.failed, summary.left) == (
        Phase.COMPLETED, 300, 0, 0,
    )  # fmt: skip
    assert summary.completion_tokens == sum(len(f"say {n}") for n in range(1, 301))
    assert summary.workers == 1
    assert 0 < summary.worker_s <= summary.job_s
    assert not await valkey_lab.entries()


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


async def test_a_failed_line_is_in_the_error_file_with_its_status(
    valkey_lab: Any, requests: Requests, working: Any, tools: Any, outcome: Outcome
) -> None:
    def answer(request: Any) -> Any:
        prompt = request.messages[-1]["content"]
        if prompt in ("prompt_too_long", "engine_died"):
            return EventError(prompt, f"because of {prompt}")
        return tools.echo(request)

    names = ("fine", "prompt_too_long", "engine_died")
    batch = prepared(requests([tools.request_line(name, name) for name in names]))
    async with working(valkey_lab, answer):
        summary = await batch.run(valkey_lab.client())
    assert (summary.completed, summary.failed) == (1, 2)
    assert summary.codes == {"prompt_too_long": 1, "engine_died": 1}
    found = outcome(batch.files)
    for name, status in (("prompt_too_long", 400), ("engine_died", 500)):
        assert found[name]["error"] is None
        assert found[name]["response"]["status_code"] == status
        assert found[name]["response"]["body"]["error"]["code"] == name
    assert len(tools.read_json_lines(batch.files.output)) == 1


async def test_a_faulty_file_stops_before_anything_is_submitted(
    valkey_lab: Any, requests: Requests, tools: Any
) -> None:
    path = requests([tools.request_line("a"), b"x", tools.request_line("a")])
    files = BatchFiles.beside(path)
    with pytest.raises(BatchRefused, match=r"2 problem.*line 2: invalid_json_line") as refused:
        prepared(path)
    assert refused.value.report.codes == {"invalid_json_line": 1, "duplicate_custom_id": 1}
    assert not any(one.exists() for one in (files.output, files.errors, files.state))
    assert not await valkey_lab.raw.keys(f"{valkey_lab.keys.prefix}*")


async def test_skipped_lines_are_refusals_in_the_error_file_and_count_as_failed(
    valkey_lab: Any, requests: Requests, working: Any, tools: Any
) -> None:
    lines = [tools.request_line("a"), b"x", tools.request_line("a"), tools.request_line("b", n=0)]
    batch = prepared(requests(lines), skip="all")
    async with working(valkey_lab):
        summary = await batch.run(valkey_lab.client())
    assert (summary.total, summary.completed, summary.failed) == (4, 1, 3)
    errors = tools.read_json_lines(batch.files.errors)
    assert [(line["custom_id"], line["response"]["body"]["error"]["code"]) for line in errors] == [
        (None, "invalid_json_line"),
        ("a", "duplicate_custom_id"),
        ("b", "invalid_value"),
    ]
    for line, number in zip(errors, (2, 3, 4)):
        assert (line["error"], line["response"]["status_code"]) == (None, 400)
        assert line["response"]["body"]["error"]["line"] == number
        assert line["response"]["body"]["error"]["type"] == "invalid_request_error"


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
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome, until: Any
) -> None:
    batch = prepared(requests(30))
    seen: list[Progress] = []
    run = asyncio.create_task(batch.run(valkey_lab.client(), on_progress=seen.append))
    await until(lambda: seen and seen[-1].waiting == 30)
    await valkey_lab.raw.flushdb()
    async with working(valkey_lab):
        summary = await run
    assert (summary.completed, summary.resubmitted) == (30, 30)
    assert len(outcome(batch.files)) == 30


async def test_collected_results_are_kept_for_minutes_and_not_for_a_day(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    batch = prepared(requests(5))
    async with working(valkey_lab):
        await batch.run(valkey_lab.client())
    for line in range(1, 6):
        key = valkey_lab.keys.job(batch.state.job_id(line))
        assert 0 < await valkey_lab.raw.pttl(key) <= 600_000


async def test_failed_jobs_keep_their_dead_letter(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    batch = prepared(requests(1))
    async with working(valkey_lab, lambda _: EventError("engine_died", "no")):
        await batch.run(valkey_lab.client())
    key = valkey_lab.keys.job(batch.state.job_id(1))
    assert await valkey_lab.raw.pttl(key) > 600_000


@pytest.mark.parametrize("skipping", [False, True])
async def test_ordered_output_has_the_order_of_the_input(
    skipping: bool, valkey_lab: Any, requests: Requests, working: Any, tools: Any
) -> None:
    lines: list[Any] = [tools.request_line(f"c{n}", f"say {n}") for n in range(100)]
    if skipping:
        lines[10] = lines[50] = lines[99] = b"x"
    batch = prepared(requests(lines), ordered=True, skip="all")
    held: list[Any] = []
    async with working(valkey_lab, lambda r: None) as worker:
        run = asyncio.create_task(batch.run(valkey_lab.client(), in_flight=30))
        while not run.done():
            await asyncio.sleep(0.005)
            held, worker.held = worker.held, []
            for job in reversed(held):
                await worker.end(job)
        await run
    output = tools.read_json_lines(batch.files.output)
    assert [line["custom_id"] for line in output] == [
        f"c{n}" for n in range(100) if not (skipping and n in (10, 50, 99))
    ]
    errors = tools.read_json_lines(batch.files.errors)
    assert [line["response"]["body"]["error"]["line"] for line in errors] == (
        [11, 51, 100] if skipping else []
    )


async def test_at_most_in_flight_jobs_are_on_their_way(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    batch = prepared(requests(500))
    most = 0

    def look(progress: Progress) -> None:
        nonlocal most
        most = max(most, progress.running + progress.waiting)

    async with working(valkey_lab):
        await batch.run(valkey_lab.client(), in_flight=16, on_progress=look)
    assert 0 < most <= 16


async def test_a_full_queue_is_waited_for(
    valkey_lab: Any, requests: Requests, working: Any, outcome: Outcome
) -> None:
    from tokenfleet.worker.rules import Rules, TenantLimits

    await Rules(valkey_lab.connection).set_limits(TenantLimits("default", waiting=7))
    batch = prepared(requests(60))
    notes: set[str | None] = set()
    async with working(valkey_lab) as worker:
        client = valkey_lab.client()
        summary = await batch.run(client, on_progress=lambda p: notes.add(p.note))
    assert "the queue is full" in notes
    assert (summary.completed, len(outcome(batch.files)), len(worker.seen)) == (60, 60, 60)


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


async def test_an_input_that_shrinks_while_it_runs_ends_the_run(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    batch = prepared(requests(10))
    requests(7)
    async with working(valkey_lab):
        with pytest.raises(BatchError, match="changed while it ran"):
            await batch.run(valkey_lab.client())


def test_an_input_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BatchError, match="regular file"):
        prepared(tmp_path / "pipe")


@pytest.mark.parametrize("wrong", [{"priority": "urgent"}, {"tenant": "a:b"}])
def test_settings_out_of_range_are_refused_before_anything_is_written(
    wrong: dict[str, str], requests: Requests
) -> None:
    path = requests(1)
    with pytest.raises(InvalidJob, match=next(iter(wrong))):
        prepared(path, **wrong)
    assert not BatchFiles.beside(path).state.exists()


async def test_looking_at_a_batch_never_keeps_another_from_it(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    path = requests(3)
    batch = prepared(path)
    async with working(valkey_lab):
        looks = [asyncio.to_thread(Batch.open(batch.files).glance) for _ in range(20)]
        summary, *_ = await asyncio.gather(batch.run(valkey_lab.client()), *looks)
    assert summary.completed == 3


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


async def test_a_producers_rights_are_enough(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    from tokenfleet.producer import AsyncClient
    from tokenfleet.producer.rights import producer_rules

    rights, name = producer_rules(valkey_lab.namespace), f"producer-{valkey_lab.namespace}"
    await valkey_lab.raw.execute_command("ACL SETUSER", name, "on", ">secret", *rights)
    url = valkey_lab.server.url.replace("redis://", f"redis://{name}:secret@")
    path = requests(20)
    async with AsyncClient(url, namespace=valkey_lab.namespace) as client:
        await prepared(path).submit(client)
        await prepared(path).cancel(client)
        async with working(valkey_lab):
            summary = await prepared(path).run(client)
    assert summary.completed == 20
    await valkey_lab.raw.execute_command("ACL DELUSER", name)


async def test_lines_expire_when_the_window_is_over_even_without_a_worker(
    valkey_lab: Any, requests: Requests, tools: Any
) -> None:
    batch = prepared(requests(3), window_s=1.0)
    summary = await batch.run(valkey_lab.client())
    assert (summary.failed, summary.codes) == (3, {"batch_expired": 3})
    errors = tools.read_json_lines(batch.files.errors)
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert {line["response"] for line in errors} == {None}


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


async def test_prompts_and_raw_completions_have_their_own_shapes(
    valkey_lab: Any, requests: Requests, working: Any, tools: Any
) -> None:
    lines = [json.dumps("abc"), json.dumps({"prompt": "xyz", "id": "mine"})]
    for raw in (False, True):
        path = requests(lines, name=f"prompts-{raw}.jsonl")
        rules = FileRules(model="m", raw_prompts=raw)
        batch = Batch.prepare(BatchFiles.beside(path), rules)
        async with working(valkey_lab):
            await batch.run(valkey_lab.client())
        found = {line["custom_id"]: line for line in tools.read_json_lines(batch.files.output)}
        assert set(found) == {"line-1", "mine"}
        choice = found["mine"]["response"]["body"]["choices"][0]
        assert (choice["text"] if raw else choice["message"]["content"]) == "zyx"


async def test_line_breaks_of_unicode_do_not_break_lines(
    valkey_lab: Any, requests: Requests, working: Any, tools: Any
) -> None:
    said = "a\u2028b\u2029c\x85d\ne\r\x0b é 漢"
    batch = prepared(requests([tools.request_line("x\u2028", said)]))
    async with working(valkey_lab):
        await batch.run(valkey_lab.client())
    (line,) = batch.files.output.read_text(encoding="utf-8").splitlines()
    read = json.loads(line)
    assert read["custom_id"] == "x\u2028"
    assert read["response"]["body"]["choices"][0]["message"]["content"] == said[::-1]


async def test_progress_counts_up_to_the_end(
    valkey_lab: Any, requests: Requests, working: Any
) -> None:
    batch = prepared(requests(50))
    seen: list[Progress] = []
    async with working(valkey_lab):
        await batch.run(valkey_lab.client(), on_progress=seen.append)
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert (done[-1], seen[-1].total, seen[-1].left_s) == (50, 50, 0.0)
    glance = Batch.open(batch.files).glance()
    assert (glance.completed, glance.phase, glance.busy) == (50, Phase.COMPLETED, False)
    assert glance.progress["completed"] == 50


def test_job_ids_follow_from_batch_round_and_line(requests: Requests) -> None:
    from tokenfleet.producer.keys import partition_of

    state = prepared(requests(1)).state.at(Phase.RUNNING, partitions=16)
    ids = [state.job_id(line) for line in range(1, 2001)]
    assert ids == [state.job_id(line) for line in range(1, 2001)]
    assert len(set(ids)) == 2000
    assert {partition_of(one) for one in ids} == set(range(16))
    assert state.at(Phase.RUNNING, round=1).job_id(1) != ids[0]


def test_checking_alone_leaves_nothing_behind(requests: Requests, tmp_path: Path) -> None:
    path = requests(3)
    check_file(path)
    assert list(tmp_path.iterdir()) == [path]
