"""queue ensure, dead drop and config show: what they do, and what they say."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenfleet.producer.keys import GROUP
from tokenfleet.worker.commands.admin import Admin
from tokenfleet.worker.commands.cli import build
from tokenfleet.worker.rights import operator_rules


async def said(lab: Any, *words: str) -> tuple[int, Any]:
    """Exit code and JSON of a command about the lab's namespace."""
    where = ("--redis-url", lab.server.url, "--namespace", lab.namespace, "-o", "json")
    done = await asyncio.to_thread(CliRunner().invoke, build([*words]), [*words, *where])
    return done.exit_code, json.loads(done.stdout) if done.stdout else done.stderr


async def a_dead_job(lab: Any) -> str:
    queue = await lab.queue()
    await lab.submit(max_failures=0)
    (job,) = await queue.claim(1)
    await queue.fail(job, "engine_died", "the engine process died", retryable=True)
    return str(job.id)


async def test_ensured_queues_have_their_group_before_any_worker(valkey_lab: Any) -> None:
    code, rows = await said(valkey_lab, "queue", "ensure", "one", "two:b")
    assert code == 0
    assert {(row["model"], row["priority"]) for row in rows} == {
        (model, priority)
        for model in ("one", "two:b")
        for priority in ("interactive", "default", "batch")
    }
    for name in ("one:batch", "one:batch:front", "two:b:interactive"):
        (group,) = await valkey_lab.raw.xinfo_groups(f"{valkey_lab.keys.prefix}:q:{name}")
        assert group["name"] == GROUP.encode()


async def test_ensuring_again_changes_nothing(valkey_lab: Any) -> None:
    await valkey_lab.submit()
    await said(valkey_lab, "queue", "ensure", "m")
    queue = await valkey_lab.queue()
    (job,) = await queue.claim(1)
    code, rows = await said(valkey_lab, "queue", "ensure", "m")
    assert (code, {row["waiting"] for row in rows}) == (0, {0})
    assert await valkey_lab.state(job.id) == "running"


async def test_a_dropped_dead_letter_leaves_nothing_of_its_job(valkey_lab: Any) -> None:
    dead, other = await a_dead_job(valkey_lab), await a_dead_job(valkey_lab)
    code, rows = await said(valkey_lab, "dead", "drop", dead)
    assert (code, rows) == (0, [{"job_id": dead, "dropped": True, "error": None}])
    assert [letter.job_id for letter in await Admin(valkey_lab.connection).dead()] == [other]
    assert not [key async for key in valkey_lab.raw.scan_iter(match=f"*{dead}*")]
    code, rows = await said(valkey_lab, "dead", "drop", "--all")
    assert (code, [row["job_id"] for row in rows]) == (0, [other])
    assert await Admin(valkey_lab.connection).dead() == []


async def test_only_dead_letters_can_be_dropped(valkey_lab: Any) -> None:
    alive = await valkey_lab.submit()
    code, rows = await said(valkey_lab, "dead", "drop", alive)
    assert (code, rows[0]["dropped"]) == (1, False)
    assert await valkey_lab.state(alive) == "waiting"
    assert (await said(valkey_lab, "dead", "drop"))[0] == 2
    assert (await said(valkey_lab, "dead", "drop", alive, "--all"))[0] == 2


async def test_an_operators_rights_are_enough(valkey_lab: Any) -> None:
    dead = await a_dead_job(valkey_lab)
    rights = operator_rules(valkey_lab.namespace)
    name = f"operator-{valkey_lab.namespace}"
    await valkey_lab.raw.execute_command("ACL SETUSER", name, "on", ">secret", *rights)
    url = valkey_lab.server.url.replace("redis://", f"redis://{name}:secret@")
    where = ("--redis-url", url, "--namespace", valkey_lab.namespace)
    for words in (("queue", "ensure", "other"), ("dead", "drop", dead), ("queue", "list")):
        done = await asyncio.to_thread(CliRunner().invoke, build([*words]), [*words, *where])
        assert done.exit_code == 0, done.output
    await valkey_lab.raw.execute_command("ACL DELUSER", name)


def shown(*words: str) -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(build(["config"]), ["config", "show", "-o", "json", *words])
    assert done.exit_code == 0, done.output
    return {row["setting"]: row for row in json.loads(done.stdout)}


def test_config_show_names_where_each_setting_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('max_num_seqs = 9\nlease_s = 5\nredis_url = "redis://me:secret@host/0"\n')
    monkeypatch.setenv("TOKENFLEET_LEASE_S", "7")
    for name in ("TOKENFLEET_MODEL", "TOKENFLEET_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOKENFLEET_CONFIG", str(file))
    found = shown()
    assert found["max_num_seqs"] == {"setting": "max_num_seqs", "value": 9, "from": str(file)}
    assert found["lease_s"] == {"setting": "lease_s", "value": 7.0, "from": "TOKENFLEET_LEASE_S"}
    assert found["prefix_cache"]["from"] == "default"
    assert found["redis_url"]["value"] == "redis://me:***@host/0"
    assert found["model"]["value"] is None
    assert set(shown("--changed")) == {"max_num_seqs", "lease_s", "redis_url", "model"}


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        (
            "redis://:secret@host:1/0?db=2&password=secret",
            "redis://:***@host:1/0?db=2&password=***",
        ),
        (
            "redis+sentinel://me@a:1,b:2/service/0?sentinel_password=secret",
            "redis+sentinel://me@a:1,b:2/service/0?sentinel_password=***",
        ),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    ],
)
def test_config_show_shows_no_password_wherever_a_url_has_it(
    monkeypatch: pytest.MonkeyPatch, url: str, seen: str
) -> None:
    monkeypatch.setenv("TOKENFLEET_REDIS_URL", url)
    assert shown()["redis_url"]["value"] == seen


def test_config_show_refuses_what_a_worker_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENFLEET_LEASE_S", "soon")
    done = CliRunner().invoke(build(["config"]), ["config", "show"])
    assert done.exit_code == 2
    assert "lease_s" in done.stderr


@pytest.mark.parametrize(
    "words", [("doctor",), ("queue", "list"), ("queue", "limit"), ("queue", "ensure", "m")]
)
def test_a_server_that_cannot_be_used_is_exit_code_3(valkey: Any, run: Any, words: Any) -> None:
    place = valkey.url.rpartition("/")[0]
    done = run(*words, "--redis-url", f"{place}/99")
    assert (done.returncode, done.stdout) == (3, "")
    assert "DB index is out of range" in done.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_typed_error_that_a_command_did_not_foresee_is_a_sentence_and_a_code(
    run: Any, form: str
) -> None:
    no_server = shutil.which("false")
    assert no_server is not None
    done = run("bench", "queue", "--server", no_server, "-o", form)
    assert done.returncode == 3
    assert "the embedded server ended at once" in done.stderr
    assert "Traceback" not in done.stderr
