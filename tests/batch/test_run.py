"""Running a batch against a real server: every line once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer import InvalidJob
from tokenfleet.producer.batch import (
    Batch,
    BatchError,
    BatchFiles,
    BatchRefused,
    BatchSettings,
    FileRules,
    Phase,
    Progress,
    check_file,
)
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
