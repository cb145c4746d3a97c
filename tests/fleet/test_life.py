"""One or two workers: start, stop, cancel, deadline, and what they leave behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal

import pytest

from tokenfleet.producer import DeadlineExceeded, JobCancelled, JobFailed


async def test_a_worker_streams_jobs_and_its_own_process_never_loads_torch(
    model_fleet, tools
) -> None:
    worker = await model_fleet.start()
    jobs = [await model_fleet.submit(f"prompt {i}", 20 + i) for i in range(10)]
    followed = await model_fleet.follow(*jobs)
    assert all(len(f.events[0].token_ids) >= 1 for f in followed)
    assert "libtorch" not in tools.maps(worker.pid)
    assert "libtorch" in tools.maps(tools.engine_pid(worker))
    ready = await model_fleet.said(worker, "worker_ready")
    assert {"imports_s", "engine_imports_s", "model_s", "registered_s", "total_s"} <= ready.keys()
    assert await worker.stop(240.0) == 0


async def test_sigterm_with_a_long_grace_finishes_what_runs_and_takes_nothing_new(
    fleet, until, tools
) -> None:
    worker = await fleet.start(max_num_seqs=4, prefetch=2, grace_s=240, lease_s=60)
    engine = tools.engine_pid(worker)
    jobs = [await fleet.submit(f"job {i} ", 400) for i in range(10)]
    await until(lambda: _offset(jobs[3]))
    os.kill(engine, signal.SIGSTOP)  # no job ends while the worker hears of its own end
    os.kill(worker.pid, signal.SIGTERM)
    await fleet.said(worker, "draining")
    await until(lambda: _holds(fleet, worker, 4))
    os.kill(engine, signal.SIGCONT)
    assert await worker.ended() == 0
    states = [(await job.status()).state for job in jobs]
    assert states == ["finished"] * 4 + ["waiting"] * 6
    assert await fleet.pending() == 0
    assert not tools.alive(engine)
    await fleet.start()
    for followed, number in zip(await fleet.follow(*jobs), range(10)):
        assert followed.text == tools.repeated(f"job {number} ", 400)


async def test_sigterm_with_a_short_grace_hands_over_and_no_token_is_made_twice(
    fleet, until, tools
) -> None:
    first = await fleet.start(grace_s=0, lease_s=60, simulated_step_ms=25)
    second = fleet.spawn(lease_s=60)
    jobs = [await fleet.submit(f"job {i} ", 600) for i in range(8)]
    await until(lambda: _offset(jobs[-1]))
    await second.start()
    assert await first.stop(240.0) == 0
    for number, followed in enumerate(await fleet.follow(*jobs)):
        assert followed.text == tools.repeated(f"job {number} ", 600)
        assert followed.events[-1].attempt == 2
        assert (await followed.job.status()).failures == 0


async def test_a_second_sigterm_hands_over_at_once(fleet, until) -> None:
    worker = await fleet.start(grace_s=3600)
    job = await fleet.submit("endless ", 100_000 // 20)
    await until(lambda: _offset(job))
    os.kill(worker.pid, signal.SIGTERM)
    await fleet.said(worker, "draining")
    assert await worker.stop(240.0) == 0
    assert (await job.status()).state == "waiting"


async def test_cancel_frees_the_slot_of_a_running_job(fleet, until, tools) -> None:
    worker = await fleet.start(max_num_seqs=1, prefetch=0)
    running = await fleet.submit("endless ", 5000)
    behind = await fleet.submit("next ", 20)
    await until(lambda: _offset(running))
    await running.cancel()
    (followed,) = await fleet.follow(behind)
    assert followed.text == tools.repeated("next ", 20)
    with pytest.raises(JobCancelled):
        await running.result(timeout_s=240)
    assert await fleet.pending(worker) == 0


async def test_a_job_cancelled_with_no_worker_up_never_runs(fleet) -> None:
    cancelled, other = await fleet.submit("no ", 20), await fleet.submit("yes ", 20)
    await cancelled.cancel()
    await fleet.start()
    await fleet.follow(other)
    events = [event async for event in cancelled.stream()]
    assert [(e.final, e.finish_reason, e.attempt) for e in events] == [(True, "cancelled", 0)]


async def test_a_deadline_ends_a_running_job(fleet) -> None:
    await fleet.start()
    events, deadline_s = [], 0.5
    while len(events) < 2:  # a slow machine needs a later one for the job to have begun
        job = await fleet.submit("endless ", 5000, deadline_s=deadline_s)
        events = [event async for event in job.stream()]
        assert events[-1].finish_reason == "expired"
        deadline_s *= 2
    with pytest.raises(DeadlineExceeded):
        await job.result(timeout_s=240)


async def test_a_subscriber_that_leaves_cancels_a_job_that_asked_for_it(fleet, until) -> None:
    await fleet.start(max_num_seqs=2)
    watched = await fleet.submit("a ", 5000, on_disconnect="cancel")
    unwatched = await fleet.submit("b ", 300)
    stream = watched.stream()
    await anext(stream)
    await stream.aclose()
    await until(lambda: _state(watched, "cancelled"))
    (followed,) = await fleet.follow(unwatched)
    assert len(followed.text) == 300


async def test_bad_jobs_fail_with_a_code_and_the_worker_lives_on(model_fleet) -> None:
    await model_fleet.start(max_model_len=64)
    client = model_fleet.client
    bad = {
        "prompt_too_long": {"prompt": "x" * 65},
        "token_out_of_range": {"prompt_token_ids": [1, 259]},
        "no_chat_template": {"messages": [{"role": "user", "content": "hi"}]},
    }
    for code, fields in bad.items():
        job = await client.submit(model="m", **fields)
        with pytest.raises(JobFailed) as failure:
            await job.result(timeout_s=240)
        assert failure.value.code == code
        assert failure.value.attempts == 1
    fits = await model_fleet.submit("x" * 63, 100)
    (followed,) = await model_fleet.follow(fits)
    assert (len(followed.text.encode()) > 0, followed.events[-1].finish_reason) == (True, "length")


async def test_an_idle_worker_logs_no_trouble_and_takes_the_next_job_at_once(fleet, tools) -> None:
    worker = await fleet.start()
    await asyncio.sleep(30 if tools.long else 6)  # longer than redis-py's socket timeout
    await fleet.follow(await fleet.submit("hello ", 5))
    assert [line for line in fleet.log(worker) if line["level"] in ("warning", "error")] == []


async def test_a_model_that_cannot_be_served_ends_the_start_by_name(
    model_fleet, tiny_llama, tmp_path, until
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    worker = model_fleet.spawn(model=broken)
    await worker.start()
    await until(lambda: not worker.alive)
    assert await worker.stop() == 2
    refused = await model_fleet.said(worker, "model_refused")
    assert "model.safetensors" in refused["error"]


async def _offset(job) -> bool:
    return (await job.status()).offset > 0


async def _holds(fleet, worker, count: int) -> bool:
    return await fleet.held(worker) == count


async def _state(job, state: str) -> bool:
    return (await job.status()).state == state
