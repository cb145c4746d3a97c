"""submit, stream, result and cancel, and the exit code of everything that can go wrong."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.keys import partition_for_key, partition_of


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_submit_prints_the_id_and_result_the_text(echo: Any) -> None:
    submitted = echo.run("submit", "abc", "--raw", "--max-tokens", "7")
    assert (submitted.returncode, submitted.stderr) == (0, "")
    job_id = submitted.stdout.strip()
    found = echo.run("result", job_id, "--timeout-s", "20")
    assert (found.returncode, found.stdout) == (0, "abcabca\n")


def test_submit_and_stream_write_the_text_and_nothing_else_to_standard_output(echo: Any) -> None:
    done = echo.run("submit", "--stream", "--raw", "abc", "--max-tokens", "7")
    assert (done.returncode, done.stdout) == (0, "abcabca\n")
    job_id = done.stderr.removeprefix("job ").strip()
    again = echo.run("stream", job_id)
    assert (again.returncode, again.stdout) == (0, "abcabca\n")
    rest = echo.run("stream", job_id, "--from-offset", "7")
    assert (rest.returncode, rest.stdout) == (0, "\n")


def test_a_prompt_is_a_chat_message_unless_raw(echo: Any) -> None:
    done = echo.run("submit", "--wait", "hi", "--system", "be brief", "--max-tokens", "22")
    assert done.stdout == "system:be briefuser:hi\n"


def test_who_streams_one_of_several_samples_is_told_where_the_others_are(echo: Any) -> None:
    done = echo.run("submit", "--stream", "--raw", "abc", "--max-tokens", "3", "-n", "2")
    assert (done.returncode, done.stdout) == (0, "abc\n")
    job_id = done.stderr.split()[1]
    assert f"tokenfleet result {job_id}" in done.stderr


@pytest.mark.parametrize("arguments", [("-",), ()])
def test_a_prompt_may_come_from_standard_input(echo: Any, arguments: tuple[str, ...]) -> None:
    options = ("--wait", "--raw", "--max-tokens", "3")
    done = echo.run("submit", *arguments, *options, stdin="xyz")
    assert (done.returncode, done.stdout) == (0, "xyz\n")


def test_events_as_json_join_to_the_result_as_json(echo: Any) -> None:
    done = echo.run("submit", "--stream", "--raw", "abc", "--max-tokens", "9", "-o", "json")
    events = lines_of(done.stdout)
    assert [event["final"] for event in events] == [False] * (len(events) - 1) + [True]
    made = [token for event in events for token in event["token_ids"]]
    assert [event["offset"] for event in events] == [
        sum(len(e["token_ids"]) for e in events[:number]) for number in range(len(events))
    ]
    waited = echo.run("submit", "--wait", "--raw", "abc", "--max-tokens", "9", "-o", "json")
    (result,) = lines_of(waited.stdout)
    assert result["choices"][0]["token_ids"] == made
    assert result["choices"][0]["text"] == "abcabcabc"
    assert result["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}


def test_an_idempotency_key_gives_the_same_job(echo: Any) -> None:
    arguments = ("submit", "--raw", "abc", "--idempotency-key", "k1", "-o", "json")
    (first,), (second,) = (lines_of(echo.run(*arguments).stdout) for _ in range(2))
    assert first["job_id"] == second["job_id"]
    assert (first["deduplicated"], second["deduplicated"]) == (False, True)
    other = echo.run("submit", "--raw", "other", "--idempotency-key", "k1")
    assert other.returncode == 2
    assert "k1" in other.stderr


def test_a_failed_job_is_exit_code_1_with_its_reason(echo: Any) -> None:
    done = echo.run("submit", "--wait", "--raw", "-", stdin="x" * 2001)
    assert done.returncode == 1
    assert "at most" in done.stderr
    streamed = echo.run("submit", "--stream", "--raw", "-", "-o", "json", stdin="x" * 2001)
    assert streamed.returncode == 1
    assert lines_of(streamed.stderr)[-1]["error"] == "prompt_too_long"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("submit", ""), "must not be empty"),
        (("submit", "-"), "must not be empty"),
        (("submit", "x", "--top-p", "1.5"), "top-p"),
        (("submit", "x", "--priority", "urgent"), "urgent"),
        (("submit", "x", "--raw", "--system", "s"), "needs --chat"),
        (("submit", "x", "--timeout-s", "1"), "needs --wait"),
        (("submit", "x", "--stop", ""), "stop"),
        (("submit", "x", "--tenant", "a:b"), "tenant"),
        (("submit", "x", "--no-such-flag"), "no-such-flag"),
        (("result", "17"), "job id"),
        (("stream", "17"), "job id"),
        (("cancel", "17"), "job id"),
        (("submit", "x", "--redis-url", "http://localhost"), "redis"),
        (("no-such-command",), "no-such-command"),
        (("dead", "replay"), "--all"),
        (("queue", "pause", ""), "name of a model"),
        (("queue", "ensure", "two\nlines"), "name of a model"),
        (("acl", "producer", "--namespace", "a:b"), "namespace"),
        (("acl", "producer", "--user", "two words"), "user"),
    ],
)
def test_bad_input_is_exit_code_2_and_named(
    echo: Any, arguments: tuple[str, ...], message: str
) -> None:
    done = echo.run(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("no-such-command", "-o", "json"), "UsageError", "no-such-command"),
        (("queue", "list", "--output=json", "--nope"), "NoSuchOption", "--nope"),
        (("submit", "x", "-ojson", "--priority", "urgent"), "BadParameter", "--priority"),
        (("result", "--output", "json"), "MissingParameter", "job_id"),
        (("dead", "replay", "-o", "json"), "BadParameter", "--all"),
    ],
)
def test_words_that_cannot_be_used_are_told_to_a_program_as_all_errors_are(
    run: Any, arguments: tuple[str, ...], kind: str, message: str
) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    said = json.loads(done.stderr)
    assert said["error"] == kind
    assert message in said["message"]


def test_a_word_behind_two_dashes_asks_for_no_form(run: Any) -> None:
    done = run("submit", "--", "x", "-o", "json")
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: ")


def test_jobs_go_where_the_workers_of_the_fleet_look(valkey: Any, run: Any) -> None:
    there = ("--redis-url", valkey.url, "--namespace", "seven-parts")
    words = ("submit", "x", "--idempotency-key", "key", *there)
    job_id = run(*words, TOKENFLEET_PARTITIONS="7").stdout.strip()
    assert partition_of(job_id) == partition_for_key("default", "key", 7) != 0
    refused = run(*words, "-o", "json", TOKENFLEET_PARTITIONS="none")
    assert refused.returncode == 2
    assert "TOKENFLEET_PARTITIONS" in json.loads(refused.stderr)["message"]


def test_an_unreachable_broker_is_exit_code_3(run: Any) -> None:
    nowhere = ("--redis-url", "redis://127.0.0.1:1/0")
    done = run("submit", "x", *nowhere)
    assert done.returncode == 3
    assert "redis://127.0.0.1:1 was not reached" in done.stderr
    as_json = run("queue", "list", *nowhere, "-o", "json")
    assert as_json.returncode == 3
    said = json.loads(as_json.stderr)
    assert (said["error"], "is it running" in said["message"]) == ("BrokerUnavailable", True)


def test_time_that_runs_out_is_exit_code_4_and_the_job_goes_on(echo: Any) -> None:
    done = echo.run("submit", "x", "--wait", "--timeout-s", "0.2", "--model", "nobody-serves-it")
    assert done.returncode == 4
    job_id = done.stderr.split()[1]
    assert f"tokenfleet result {job_id}" in done.stderr, "how to come back for it"
    now = echo.run("result", job_id)
    assert now.returncode == 4
    assert "waiting" in now.stderr
    cancelled = echo.run("cancel", job_id, "-o", "json")
    assert json.loads(cancelled.stdout) == [{"job_id": job_id, "state": "cancelled"}]
    assert echo.run("result", job_id).returncode == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_a_stream_says_how_to_go_on_and_does_not_end_the_job(
    echo: Any, number: signal.Signals, code: int
) -> None:
    follower = echo.start("submit", "--stream", "--raw", "abc", "--max-tokens", "1500")
    assert follower.stdout is not None
    assert follower.stdout.read(3) == b"abc"
    follower.send_signal(number)
    _, said = follower.communicate(timeout=240)
    assert follower.returncode == code
    job_id = said.decode().split()[1]
    assert f"tokenfleet stream {job_id} --from-offset" in said.decode()
    state = json.loads(echo.run("cancel", job_id, "-o", "json").stdout)[0]["state"]
    assert state in ("running", "finished")  # finished where the machine takes seconds to get here


def test_who_waits_for_a_model_that_nobody_serves_is_told_so(echo: Any) -> None:
    waiting = echo.start("submit", "x", "--wait", "--model", "smolm2")
    job_id = waiting.stderr.readline().decode().split()[1]
    said = waiting.stderr.readline().decode()
    assert "no live worker serves 'smolm2' (served: echo)" in said
    echo.run("cancel", job_id)
    waiting.communicate(timeout=240)
    assert waiting.returncode == 1


def test_a_prompt_that_is_no_text_is_refused(echo: Any) -> None:
    done = echo.run("submit", stdin="\udcff\udcfe")
    assert (done.returncode, "not UTF-8" in done.stderr) == (2, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("words", [("submit", "--stream", "--raw", "abc"), ("queue", "list")])
def test_output_that_cannot_be_written_is_exit_code_2(echo: Any, words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        writer = echo.start(*words, stdout=full.fileno())
        _, said = writer.communicate(timeout=240)
    assert writer.returncode == 2, said
    assert b"No space left" in said
    assert b"Traceback" not in said


@pytest.mark.parametrize("words", [("config", "show"), ("queue", "list"), ("top", "--once")])
def test_a_reader_that_has_left_before_a_list_is_no_error(echo: Any, words: Any) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = echo.start(*words, stdout=writing)
    os.close(writing)
    _, said = writer.communicate(timeout=240)
    assert (writer.returncode, b"Traceback" in said) == (0, False)


def test_a_reader_that_leaves_is_no_error(echo: Any) -> None:
    reading, writing = os.pipe()
    arguments = ("submit", "--stream", "--raw", "abc", "--max-tokens", "400")
    writer = echo.start(*arguments, stdout=writing)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    _, said = writer.communicate(timeout=240)
    assert writer.returncode == 0
    assert b"Traceback" not in said
