"""Faulty files: each fault is found at its line, with its code, before anything is submitted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenfleet.producer.batch import FileRules, Form, Kind, Problem, check_file

Requests = Callable[..., Path]
COMPLETIONS = "/v1/completions"


def problems(path: Path, **rules: Any) -> list[Problem]:
    found: list[Problem] = []
    report = check_file(path, FileRules(**rules), on_problem=found.append)
    assert report.problems == tuple(found)
    return found


def codes(path: Path, **rules: Any) -> list[tuple[int | None, str]]:
    return [(problem.line, problem.code) for problem in problems(path, **rules)]


def test_a_good_file_is_understood(requests: Requests) -> None:
    report = check_file(requests(5))
    assert (report.lines, report.valid, report.problems) == (5, 5, ())
    assert (report.endpoint, report.model, report.form) == (
        "/v1/chat/completions", "m", Form.OPENAI,
    )  # fmt: skip
    assert not report.stops("none")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"not json", "invalid_json_line"),
        (b"", "invalid_json_line"),
        (b"   \t", "invalid_json_line"),
        (b'{"custom_id": "a"', "invalid_json_line"),
        (b"[1, 2]", "invalid_json_line"),
        (b"7", "invalid_json_line"),
        (b"null", "invalid_json_line"),
        (b'{"custom_id": "a\xff"}', "invalid_json_line"),
        (b'{"custom_id": "a\xc3"}', "invalid_json_line"),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line"),
        (b'{"custom_id": NaN}', "invalid_json_line"),
        (b'{"custom_id": -Infinity}', "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b'{"custom_id": ' + b"9" * 5000 + b"}", "invalid_json_line"),
        ("\ufeff{}".encode("utf-16-le"), "invalid_json_line"),
        (b"{}", "missing_required_parameter"),
    ],
)
def test_a_broken_line_is_found_at_its_number(
    line: bytes, code: str, requests: Requests, tools: Any
) -> None:
    path = requests([tools.request_line("a"), line, tools.request_line("b")])
    assert codes(path) == [(2, code)]


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "  "}, "invalid_custom_id", "custom_id"),
        ({"custom_id": 7}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"custom_id": "a"}, "duplicate_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"method": None}, "missing_required_parameter", "method"),
        ({"url": COMPLETIONS}, "url_mismatch", "url"),
        ({"url": "/v1/embeddings"}, "url_mismatch", "url"),
        ({"url": 7}, "invalid_type", "url"),
        ({"url": None}, "missing_required_parameter", "url"),
        ({"body": None}, "missing_required_parameter", "body"),
        ({"body": "x"}, "invalid_type", "body"),
        ({"bodi": {}}, "unknown_parameter", "bodi"),
        ({"body": {"model": "n", "messages": []}}, "model_mismatch", "body.model"),
    ],
)
def test_a_line_that_does_not_fit_is_found_with_its_place(
    changes: dict[str, Any], code: str, param: str, requests: Requests, tools: Any
) -> None:
    path = requests([tools.request_line("a"), {**tools.request_line("b"), **changes}])
    (problem,) = problems(path)
    assert (problem.line, problem.code, problem.param) == (2, code, param)
    assert problem.kind is Kind.LINE


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"n": 0}, "invalid_value", "n"),
        ({"foo": 1}, "unknown_parameter", "foo"),
        ({"stream": True}, "unsupported_value", "stream"),
        ({"messages": None}, "missing_required_parameter", "messages"),
        ({"model": None}, "missing_required_parameter", "model"),
        ({"metadata": {"x": "y" * 300_000}}, "invalid_value", "job"),
    ],
)
def test_a_refused_body_is_found_with_line_code_and_custom_id(
    changes: dict[str, Any], code: str, param: str, requests: Requests, tools: Any
) -> None:
    path = requests([tools.request_line("a"), tools.request_line("b", **changes)])
    (problem,) = problems(path)
    assert (problem.line, problem.code, problem.param) == (2, code, param)
    assert (problem.kind, problem.custom_id) == (Kind.BODY, "b")


def test_an_empty_file_is_refused_whatever_may_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    report = check_file(path)
    assert [(p.line, p.code, p.kind) for p in report.problems] == [(None, "empty_file", Kind.FILE)]
    assert report.stops("all")


def test_too_many_lines_are_refused_and_not_read(requests: Requests) -> None:
    path = requests(5)
    assert codes(path, max_lines=5) == []
    assert codes(path, max_lines=3) == [(4, "too_many_tasks")]
    assert check_file(path, FileRules(max_lines=3)).stops("all")


def test_a_first_line_with_a_url_that_nobody_serves_does_not_decide_for_the_rest(
    requests: Requests, tools: Any
) -> None:
    path = requests([{**tools.request_line("a"), "url": "/v1/x"}, tools.request_line("b")])
    assert codes(path) == [(1, "invalid_url")]


def test_endpoint_and_model_may_be_fixed_from_outside(requests: Requests) -> None:
    path = requests(2)
    wrong_url = [(1, "url_mismatch"), (2, "url_mismatch")]
    assert codes(path, endpoint=COMPLETIONS) == wrong_url
    assert codes(path, model="other") == []


def test_a_model_from_outside_takes_lines_of_any_model(requests: Requests, tools: Any) -> None:
    lines = [tools.request_line(name, model=name) for name in "abc"]
    assert codes(requests(lines)) == [(2, "model_mismatch"), (3, "model_mismatch")]
    assert codes(requests(lines), model="m") == []


def test_a_byte_order_mark_and_crlf_are_reported_and_read_over(tmp_path: Path, tools: Any) -> None:
    lines = [json.dumps(tools.request_line(name)) for name in "abc"]
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert codes(path) == [(1, "byte_order_mark"), (1, "crlf_line_ending")]
    report = check_file(path)
    assert (report.valid, report.stops("none"), report.codes) == (3, False, {})


def test_a_byte_order_mark_anywhere_else_is_no_json(requests: Requests, tools: Any) -> None:
    marked = b"\xef\xbb\xbf" + json.dumps(tools.request_line("b")).encode()
    assert codes(requests([tools.request_line("a"), marked])) == [(2, "invalid_json_line")]


def test_a_line_that_is_too_long_is_not_held_and_the_next_is_read(
    requests: Requests, tools: Any
) -> None:
    long = tools.request_line("b", prompt="x" * 5000)
    path = requests([tools.request_line("a"), long, tools.request_line("c")])
    assert codes(path, max_line_bytes=1000) == [(2, "invalid_json_line")]
    exactly = len(json.dumps(long))
    assert codes(path, max_line_bytes=exactly) == []
    assert codes(path, max_line_bytes=exactly - 1) == [(2, "invalid_json_line")]


def test_the_digest_changes_with_every_byte(tmp_path: Path, requests: Requests) -> None:
    path = requests(3)
    first = check_file(path)
    content = path.read_bytes()
    assert first.size == len(content)
    other = tmp_path / "other.jsonl"
    other.write_bytes(content[:-1])
    second = check_file(other)
    assert (second.lines, second.digest == first.digest) == (3, False)


def test_all_problems_are_counted_and_the_first_thousand_kept(requests: Requests) -> None:
    report = check_file(requests([b"x"] * 1500))
    assert (len(report.problems), report.codes) == (1000, {"invalid_json_line": 1500})


@pytest.mark.parametrize(("skip", "stopped"), [("none", True), ("bodies", True), ("all", False)])
def test_what_may_be_skipped_is_said_beforehand(
    skip: str, stopped: bool, requests: Requests, tools: Any
) -> None:
    broken = check_file(requests([tools.request_line("a"), b"x"]))
    assert broken.stops(skip) is stopped
    refused = check_file(requests([tools.request_line("a"), tools.request_line("b", n=0)]))
    assert refused.stops(skip) is (skip == "none")


PROMPTS = [
    "plain text as JSON",
    {"prompt": "with its own limit", "max_tokens": 3},
    {"id": "mine", "prompt": "named"},
    {"custom_id": "chat", "messages": [{"role": "user", "content": "hi"}]},
]


def test_a_file_of_prompts_needs_no_ids_and_a_model_from_outside(requests: Requests) -> None:
    path = requests([json.dumps(line) for line in PROMPTS])
    report = check_file(path, FileRules(model="m", defaults={"max_tokens": 9}))
    assert (report.form, report.valid, report.problems) == (Form.PROMPTS, 4, ())
    assert [code for _, code in codes(path)] == ["missing_required_parameter"] * 4


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({"max_tokens": 3}, "missing_required_parameter"),
        ({"prompt": "a", "messages": []}, "missing_required_parameter"),
        ({"prompt": ""}, "invalid_type"),
        ({"prompt": 4}, "invalid_type"),
        ({"prompt": "a", "id": ""}, "invalid_custom_id"),
        ({"prompt": "a", "id": "line-1"}, "duplicate_custom_id"),
        ({"prompt": "a", "foo": 1}, "unknown_parameter"),
        (7, "invalid_json_line"),
    ],
)
def test_a_file_of_prompts_is_held_to_its_form(line: Any, code: str, requests: Requests) -> None:
    path = requests([json.dumps("a"), json.dumps(line)])
    assert codes(path, model="m") == [(2, code)]


def test_a_second_pass_finds_the_same(requests: Requests, tools: Any) -> None:
    lines = [tools.request_line("a"), b"x", tools.request_line("a"), tools.request_line("b", n=0)]
    path = requests(lines)
    assert problems(path) == problems(path)
