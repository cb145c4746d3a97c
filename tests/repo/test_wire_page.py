"""producer/README.md names the keys, fields, scripts and codes that the code has, and no others."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from tokenfleet.engine.errors import InvalidRequest
from tokenfleet.engine.request import ENGINE_ERROR, NO_TOKEN_ALLOWED
from tokenfleet.producer.client import LOG_TTL_S, RESULT_TTL_S
from tokenfleet.producer.keys import GROUP, PRIORITIES, Keys
from tokenfleet.producer.kinds import kind_of
from tokenfleet.producer.protocol import (
    MAX_JOB_BYTES,
    SCHEMA_VERSION,
    Choice,
    Event,
    JobRequest,
    JobResult,
    SamplingParams,
    State,
    Timings,
    Usage,
)
from tokenfleet.producer.stream import SILENCE_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "producer" / "README.md").read_text()
FRONT = {"common", "tenants", "moves", "taking"}
SCRIPTS = {
    path.stem: path.read_text()
    for place in ("producer", "worker")
    for path in (ROOT / place / "lua").glob("*.lua")
}
LUA = "\n".join(SCRIPTS.values())


def table(head: str) -> list[list[str]]:
    """The cells of the table whose first column has this head."""
    found = re.search(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found, head
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        for row in found[1].splitlines()
    ]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names(head: str) -> set[str]:
    return {name for row in table(head) for name in quoted(row[0])}


def of(*kinds: type) -> set[str]:
    return {spec.name for kind in kinds for spec in fields(kind)}


def test_every_key_is_on_the_page_with_its_type() -> None:
    keys, made = Keys("n", 0), set()
    for name, maker in inspect.getmembers(Keys, lambda one: isinstance(one, property)):
        assert maker.fget is not None
        made.add(getattr(keys, name))
    for name, maker in inspect.getmembers(Keys, inspect.isfunction):
        given = [
            f"<{one.replace('job_id', 'id').removesuffix('_id')}>"
            for one in list(inspect.signature(maker).parameters)[1:]
        ]
        if name not in ("streams", "tenant") and not name.startswith("_"):
            made.add(maker(keys, *given))
    made |= {keys.tenant("<tenant>", what) for what in ("running", "waiting", "parked", "drain")}
    made.add(f"{keys.prefix}:turns:<model>:<priority>")

    shown = {}
    for row in table("key"):
        first, *others = quoted(row[0])
        kind = row[1].split(",")[0]
        for key in (first, *(first.rpartition(":")[0] + other for other in others)):
            shown[key.replace("P:", f"{keys.prefix}:", 1)] = kind
    assert set(shown) == made
    for key, kind in shown.items():
        assert kind in (kind_of(key), "channel"), key
    assert f"group `{GROUP}`" in PAGE
    assert f"Priorities: {', '.join(PRIORITIES)}" in PAGE


def test_every_field_of_a_jobs_hash_is_on_the_page() -> None:
    used = set(re.findall(r"\bjob\.(\w+)", LUA))
    asked = set(re.findall(r"'HGET', job_key\(id\), '(\w+)'", LUA))
    assert names("field") >= used | asked
    for name in names("field"):
        assert re.search(rf"'{name}'", LUA), name


def test_every_script_is_on_the_page() -> None:
    shown = {name.strip() for row in table("script") for name in row[0].split(",")}
    assert shown == SCRIPTS.keys() - FRONT
    assert all(f"`{name}.lua`" in PAGE for name in FRONT)


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - FRONT))
def test_a_scripts_header_names_every_argument_that_the_script_takes(name: str) -> None:
    header = "".join(re.findall(r"^--.*\n", SCRIPTS[name], re.MULTILINE))
    body = SCRIPTS[name].replace(header, "")
    for needed in ("KEYS", "Returns", "If it never runs"):
        assert needed in header, needed
    said = {int(number) for number in re.findall(r"ARGV\[(\d+)\]", header)}
    taken = {int(number) for number in re.findall(r"ARGV\[(\d+)\]", body)} - {1, 2}
    assert taken <= said


def test_every_field_of_a_record_is_on_the_page_with_its_default() -> None:
    assert names("event field") == of(Event)
    assert names("job field") == of(JobRequest)
    assert names("sampling field") == of(SamplingParams)
    result = names("result field")
    assert {row[0] for row in table("result field")} >= {"`choices`", "`usage`", "`timings`"}
    inner = {name for row in table("result field") for name in quoted(row[2])}
    assert result == of(JobResult)
    assert inner == of(Choice, Usage, Timings)
    for head, kind in (("event", Event), ("sampling", SamplingParams), ("result", JobResult)):
        defaults = {spec.name: _shown(spec) for spec in fields(kind)}
        for row in table(f"{head} field"):
            expected = [defaults[name] for name in quoted(row[0])]
            said = re.split(r", (?![^\[]*\])", row[1])
            assert said in (expected, expected[:1]), row[0]


def _shown(spec: object) -> str:
    """A default as the page writes it."""
    made = spec.default_factory  # type: ignore[attr-defined]  # of a dataclass's field
    default = spec.default if made is MISSING else made()  # type: ignore[attr-defined]
    if default is MISSING:
        return "always there"
    if default == "" or not isinstance(default, str):
        words = {"None": "none", "()": "[]", "''": '""', "True": "true", "False": "false"}
        plain = repr(default).replace("Usage(", "{}(").replace("Timings(", "{}(").split("(")[0]
        return words.get(repr(default), plain)
    return default


def test_every_state_reason_and_code_is_on_the_page() -> None:
    (meaning,) = [row[2] for row in table("field") if row[0] == "`state`"]
    assert meaning.split(", ") == [state.value for state in State]
    drawn = PAGE.partition("## States")[2].partition("## Keys")[0]
    assert all(state.value in drawn for state in State)
    refusals = set(re.findall(r"`(\w+)`", inspect.getdoc(InvalidRequest) or ""))
    worker = "\n".join(path.read_text() for path in (ROOT / "worker").glob("*.py"))
    ours = set(re.findall(r'(?:EventError|BadJob|_fail)\(\s*(?:\w+, )?"(\w+)"', worker))
    ours |= set(re.findall(r'(?:code = |else )"(\w+_error)"', worker))
    ours |= {"undecodable", "engine_died", ENGINE_ERROR, NO_TOKEN_ALLOWED}
    ours |= set(re.findall(r"'(worker_died|undecodable)'", LUA))
    assert names("error code") == ours | refusals - {"duplicate_id", "unknown_id"}


def test_the_numbers_on_the_page_are_the_codes() -> None:
    text = " ".join(PAGE.split())
    for number in (RESULT_TTL_S, LOG_TTL_S):
        assert f"{number * 1000:,.0f}" in text
    assert f"After {SILENCE_S:g} s of silence" in text
    assert f"schema version, {SCHEMA_VERSION})" in text
    assert f"more than {MAX_JOB_BYTES // 1024} KiB" in text
