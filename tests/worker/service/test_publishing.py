"""What reaches the log, and when."""

from __future__ import annotations

import pytest

from tokenfleet.engine.stats import StepStats
from tokenfleet.worker.engine_link.engine_process import Batch, StepEvent
from tokenfleet.worker.queue import JobQueue


async def test_a_job_streams_and_ends_with_its_result(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit("say abc")
    await until(lambda: fleet.has(job))
    request = fleet.engine.requests[job]
    assert bytes(request.prompt_token_ids) == b"say abc"
    fleet.engine.say(job, "a")
    fleet.engine.say(job, "bc")
    fleet.engine.say(job, "d", "length")
    await until(lambda: fleet.is_(job, "finished"))
    log = await fleet.log(job)
    assert [e.final for e in log][-1:] == [True]
    assert "".join(e.text for e in log) == "abcd"
    offset = 0
    for event in log:
        assert event.offset == offset
        offset = event.end
    result = await fleet.result(job)
    assert (result.text, result.finish_reason, result.attempts) == ("abcd", "length", 1)
    assert result.usage.prompt_tokens == 7
    assert result.usage.completion_tokens == 4
    assert result.timings.queue_s is not None
    assert result.timings.first_token_s is not None
    assert result.timings.total_s is not None
    assert await fleet.pending() == 0


async def test_the_first_token_does_not_wait_and_later_ones_come_together(fleet, until) -> None:
    fleet.worker(flush_interval_ms=3_600_000)
    job, other = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(other))
    fleet.engine.say(job, "a")
    await until(lambda: fleet.shows(job, "a"))
    for letter in "bcd":
        fleet.engine.say(job, letter)
    fleet.engine.say(other, "x")  # a first token takes along what waits
    await until(lambda: fleet.shows(job, "abcd"))
    assert [event.text for event in await fleet.log(job)] == ["a", "bcd"]


async def test_first_tokens_go_before_the_others_of_their_step(fleet, until, monkeypatch) -> None:
    """And in a call of their own: a reader has what a call announces once it is over."""
    emit, sent = JobQueue.emit, []

    async def watched(self, emissions):
        sent.append([job_id for job_id, _, _ in emissions])
        return await emit(self, emissions)

    monkeypatch.setattr(JobQueue, "emit", watched)
    fleet.worker(max_num_seqs=3)
    jobs = [await fleet.submit() for _ in range(3)]
    await until(lambda: fleet.has(*jobs))
    for job in jobs[:2]:
        fleet.engine.say(job, "a")
        await until(lambda job=job: fleet.shows(job, "a"))
    events = [StepEvent(fleet.engine.requests[job].id, 0, [98]) for job in jobs]
    fleet.engine.say_batch(Batch(events, [], StepStats(), []))
    await until(lambda: fleet.shows(jobs[1], "ab"))
    assert await fleet.text(jobs[2]) == "b"
    assert sent[-2:] == [[jobs[2]], jobs[:2]]


async def test_a_stop_string_ends_the_choice_here_and_in_the_engine(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit(sampling={"max_tokens": 100, "stop": ["END"]})
    await until(lambda: fleet.has(job))
    for piece in ("abcE", "N", "Dxyz"):
        fleet.engine.say(job, piece)
    await until(lambda: fleet.is_(job, "finished"))
    result = await fleet.result(job)
    assert (result.text, result.finish_reason) == ("abc", "stop")
    assert bytes(result.token_ids) == b"abcEND"
    assert result.choices[0].stop == "END"
    assert (job, 0) in fleet.engine.aborted


async def test_a_stopped_choice_does_not_stop_the_others(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit(sampling={"max_tokens": 100, "stop": ["!"], "n": 2})
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "one!", choice=0)
    fleet.engine.say(job, "", "cancelled", choice=0)
    fleet.engine.say(job, "two", choice=1)
    fleet.engine.say(job, " more", "length", choice=1)
    await until(lambda: fleet.is_(job, "finished"))
    result = await fleet.result(job)
    assert [c.text for c in result.choices] == ["one", "two more"]
    assert [c.finish_reason for c in result.choices] == ["stop", "length"]
    log = await fleet.log(job)
    assert "".join(e.text for e in log if e.choice == 1 and not e.final) == "two more"


async def test_a_refused_request_fails_alone_with_its_code(fleet, until) -> None:
    fleet.worker()
    bad, good = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(good))
    fleet.engine.refuse(bad, "prompt_too_long", "the prompt has 9 tokens; send at most 8")
    fleet.engine.say(good, "ok", "stop")
    await until(lambda: fleet.is_(bad, "failed"))
    await until(lambda: fleet.is_(good, "finished"))
    last = (await fleet.log(bad))[-1]
    assert last.final
    assert last.error is not None
    assert last.error.code == "prompt_too_long"
    assert "at most 8" in last.error.message


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": ({"role": "cursed", "content": "x"},)}, "bad_messages"),
        ({"sampling": {"temperature": 1e9}}, "invalid_parameter"),
        ({"adapter": "poems"}, "unknown_adapter"),
    ],
)
async def test_a_job_that_cannot_be_prepared_fails_and_the_next_one_runs(
    fleet, until, fields, code, monkeypatch
) -> None:
    if "sampling" in fields:  # a producer of another version may let through what ours refuses
        monkeypatch.setattr(
            "tokenfleet.producer.sampling_params.SamplingParams.__post_init__", lambda self: None
        )
    fleet.worker()
    bad = await fleet.submit(**fields)
    await until(lambda: fleet.is_(bad, "failed"))
    assert await fleet.field(bad, "error_code") == code
    good = await fleet.submit()
    await until(lambda: fleet.has(good))


async def test_a_chat_goes_through_the_template(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit(messages=({"role": "user", "content": "hi"},))
    await until(lambda: fleet.has(job))
    assert bytes(fleet.engine.requests[job].prompt_token_ids) == b"user:hi"


async def test_an_engine_error_in_one_row_fails_its_job_only(fleet, until) -> None:
    fleet.worker()
    bad, good = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(good))
    fleet.engine.say(bad, "x")
    fleet.engine.say(bad, "", "error", error="logits of step 3 are NaN")
    fleet.engine.say(good, "ok", "stop")
    await until(lambda: fleet.is_(bad, "failed"))
    await until(lambda: fleet.is_(good, "finished"))
    assert await fleet.text(bad) == "x"


async def test_a_job_that_an_engine_ends_for_its_own_fault_says_so_by_its_code(
    fleet, until
) -> None:
    fleet.worker()
    bad, broken = await fleet.submit(), await fleet.submit()
    await until(lambda: fleet.has(broken))
    fleet.engine.say_tokens(bad, [], "error", error="no such thing", error_code="unsupported")
    fleet.engine.say_tokens(broken, [], "error", error="NaN")
    for job, code in ((bad, "unsupported"), (broken, "engine_error")):
        await until(lambda job=job: fleet.is_(job, "failed"))
        assert (await fleet.log(job))[-1].error.code == code


async def test_bad_words_become_tokens_and_a_cut_prompt_counts_what_is_kept(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit(
        prompt="hello", sampling={"bad_words": ["no", [5, 6]], "truncate_prompt_tokens": 3}
    )
    await until(lambda: fleet.has(job))
    request = fleet.engine.requests[job]
    assert bytes(request.prompt_token_ids) == b"llo"
    assert request.params.bad_words == (tuple(b"no"), tuple(b" no"), (5, 6))
    fleet.engine.say(job, "ok", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    assert (await fleet.result(job)).usage.prompt_tokens == 3


async def test_jobs_without_a_seed_get_one_that_every_attempt_shares(fleet, until) -> None:
    first = fleet.worker(grace_s=0)
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    seed = fleet.engine.requests[job].params.seed
    assert seed is not None
    first.drain()
    await fleet.runs[0]
    fleet.worker()
    await until(lambda: len(fleet.engines) == 2 and fleet.has(job))
    assert fleet.engine.requests[job].params.seed == seed


async def test_a_job_without_a_token_ends_with_an_empty_result(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit(sampling={"max_tokens": 0})
    await until(lambda: fleet.has(job))
    fleet.engine.say(job, "", "length")
    await until(lambda: fleet.is_(job, "finished"))
    result = await fleet.result(job)
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "length")
    log = await fleet.log(job)
    assert [e.final for e in log] == [False] * (len(log) - 1) + [True]
    assert log[-1].finish_reason == "length"


async def test_a_character_cut_by_a_flush_comes_whole(fleet, until) -> None:
    fleet.worker()
    job = await fleet.submit()
    await until(lambda: fleet.has(job))
    letters = "é€😀"
    for byte in letters.encode():
        fleet.engine.say_tokens(job, [byte])
    key = fleet.connection.keys(0).job(job)
    await until(lambda: _offset_is(fleet.redis.hget(key, "offset"), len(letters.encode())))
    fleet.engine.say(job, ".", "stop")
    await until(lambda: fleet.is_(job, "finished"))
    log = await fleet.log(job)
    assert "".join(event.text for event in log) == letters + "."
    assert not any("\ufffd" in event.text for event in log)


async def _offset_is(reply, offset: int) -> bool:
    return int(await reply or 0) == offset
